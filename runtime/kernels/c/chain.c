// The draft of a model in one call: a forward for all texts, then each one's choices, which the next forward is fed.
// A head of another model is fed the state behind its last token, too.
//
// Where the text's last tokens stood in it before, what came after them then is guessed to come now. The guess is fed in
// the same forward, and the model chooses behind each token of it. As many tokens as it would have chosen itself are
// right. So copied text takes few forwards, and the draft is the same as with one forward for each token. This is what
// drafters/ngram.py does for the target.

#include "chain.h"

#include <stdlib.h>

#include "errors.h"

enum { MOST_MATCH = 8 };  // last tokens that are compared: a longer match is no better

// Guess up to `most` further tokens of a draft: what followed the latest of the longest matches. Returns how many. After
// a match of one token it is one, as that is right in one case of five; after longer ones it is more.
static int guess(const draft *a, int most) {
  const int64_t *text = a->tokens - a->before;
  const int length = a->before + a->count;
  int best = 0, from = 0;
  if (most <= 0) return 0;
  for (int end = length - 1; end > best && best < MOST_MATCH; --end) {
    int same = 0;
    while (same < end && same < MOST_MATCH && text[end - 1 - same] == text[length - 1 - same]) ++same;
    if (same > best) best = same, from = end;
  }
  const int count = most < best * best ? most : best * best;
  for (int j = 0; j < count; ++j) a->tokens[a->count + j] = text[from + j];  // where the text ends, of the guess
  return count;
}

// Whether a draft goes on: drafters/base.py's Chain does the same sums.
static int is_sure(const draft *a) {
  double product = 1;
  for (int i = 0; i < a->count && a->least_confidence > 0; ++i) product *= a->sure[i];
  return product >= a->least_confidence;
}

// `f` feeds each text what it lacks, and wants the logits behind the last token of each; of a model that reads states
// it asks for those that a step leaves to the next. `most_wanted` rows at once, or one for each text, may be chosen from.
// Returns 0, or what run_decoder() or choose() gives in its place.
int run_chain(const decoder *d, const batch *f, draft *drafts, const vocabulary *v, int most_wanted, int threads) {
  const int texts = f->num_wanted, outputs = d->output->outputs + (d->rarer ? d->rarer->outputs : 0), words = v->count;
  const size_t width = (size_t)d->hidden, held = d->has_states ? texts * width : 0, laid = v->ids ? (size_t)words : 0;
  const size_t room = (size_t)f->rows + (size_t)(most_wanted > texts ? most_wanted : texts);
  batch now = *f;
  int64_t *numbers = malloc(sizeof *numbers * room * 4 + 1);
  int *which = malloc(sizeof *which * (size_t)texts * 2 + 1), *guessed = which + texts;  // which draft; guesses
  float *states = malloc(sizeof *states * (held + laid) + 1), *over_words = states + held;
  int failed = numbers && which && states ? 0 : NO_MEMORY;
  int64_t *ids = numbers, *slots = ids + room, *positions = slots + room, *wanted = positions + room;
  now.ids = ids, now.slots = slots, now.positions = now.places = positions, now.wanted = wanted;
  for (int i = 0; i < texts && !failed; ++i) which[i] = i;
  for (size_t i = 0; i < laid && !failed; ++i) over_words[i] = -INFINITY;  // words that the model does not have stay so
  for (int active = texts; active && !failed;) {
    now.rows = now.num_wanted = 0;
    for (int i = 0; i < active; ++i) {
      draft *a = drafts + which[i];
      const int64_t last = f->wanted[which[i]];
      for (int64_t row = a->count ? last : i ? f->wanted[i - 1] + 1 : 0; row <= last; ++row, ++now.rows) {
        ids[now.rows] = a->count ? a->tokens[a->count - 1] : f->ids[row];
        slots[now.rows] = f->slots[row], positions[now.rows] = f->positions[row] + a->count;
      }
      ++a->forwards;
      const int most = most_wanted / active - 1, left = a->limit - a->count - 1;
      guessed[i] = a->before ? guess(a, most < left ? most : left) : 0;
      for (int j = 0; j < guessed[i]; ++j, ++now.rows) {
        ids[now.rows] = a->tokens[a->count + j];
        slots[now.rows] = f->slots[last], positions[now.rows] = positions[now.rows - 1] + 1;
      }
      for (int j = guessed[i]; j >= 0; --j) wanted[now.num_wanted++] = now.rows - 1 - j;
    }
    failed = run_decoder(d, &now, threads);
    int left = 0;
    const float *all = f->logits;
    for (int i = 0; i < active && !failed; all += (size_t)(guessed[i++] + 1) * outputs) {
      draft *a = drafts + which[i];
      int goes = 1;
      for (int j = 0, is_right = 1; goes && is_right; ++j) {
        const float *scores = all + (size_t)j * outputs;
        if (laid) {
          for (int k = 0; k < outputs; ++k) over_words[v->ids[k]] = scores[k];
          scores = over_words;
        }
        const int64_t token = choose(&a->how, scores, words, a->position + a->count);
        if (token < 0) {
          failed = (int)token;
          break;
        }
        is_right = j < guessed[i] && token == a->tokens[a->count];
        a->tokens[a->count] = token;
        if (a->least_confidence > 0) a->sure[a->count] = confidence(scores, words, (int)token);
        ++a->count;
        goes = a->count < a->limit && is_sure(a);
      }
      if (failed || !goes) continue;
      if (held) memcpy(states + left * width, f->states + wanted[i] * width, width * sizeof *states);
      which[left++] = which[i];
    }
    active = left;
    now.depth = 0;
    now.input_states = states;
  }
  free(numbers);
  free(which);
  free(states);
  return failed;
}
