// The draft of a model, token by token, in one call: a forward for all texts, then each one's choice, which the
// next forward is fed. A head of another model is fed the state behind its last token, too.

#include <stdlib.h>

#include "forward.h"

// `f` feeds each text what it lacks, and wants the logits behind the last token of each; of a model that reads states
// it asks for those that a step leaves to the next. Returns 0, or what run_decoder() or choose() gives in its place.
int run_chain(const decoder *d, const batch *f, draft *drafts, const vocabulary *v, int threads) {
  const int texts = f->num_wanted, outputs = d->output->outputs, words = v->count;
  const size_t width = (size_t)d->hidden, held = d->has_states ? texts * width : 0, laid = v->ids ? (size_t)words : 0;
  batch now = *f;
  int64_t *numbers = malloc(sizeof *numbers * (size_t)texts * 5 + 1);
  int *own = malloc(sizeof *own * (size_t)texts + 1);
  float *given = malloc(sizeof *given * (held + laid) + 1), *over_words = given + held;
  int failed = numbers && own && given ? 0 : NO_MEMORY;
  int64_t *ids = numbers, *slots = ids + texts, *positions = slots + texts, *places = positions + texts, *wanted = places + texts;
  for (int i = 0; i < texts && !failed; ++i) own[i] = i;
  for (size_t i = 0; i < laid && !failed; ++i) over_words[i] = -INFINITY;  // words that the model does not have stay so
  for (int active = texts, step = 0; active && !failed; ++step) {
    failed = run_decoder(d, &now, threads);
    int left = 0;
    for (int i = 0; i < active && !failed; ++i) {
      draft *a = drafts + own[i];
      const float *scores = f->logits + (size_t)i * outputs;
      const int64_t row = now.wanted[i];
      if (laid) {
        for (int k = 0; k < outputs; ++k) over_words[v->ids[k]] = scores[k];
        scores = over_words;
      }
      const int64_t token = choose(&a->how, scores, words, a->position + a->count);
      if (token < 0) {
        failed = (int)token;
        break;
      }
      a->tokens[a->count] = token;
      if (a->may_stop) a->sure[a->count] = confidence(scores, words, (int)token);
      ++a->count;
      if (a->count >= a->limit || (a->may_stop && !goes_on(a->may_stop, a->sure, a->count))) continue;
      const int64_t slot = now.slots[row], next = now.positions[row] + 1;  // read before they are written over
      ids[left] = token, slots[left] = slot, positions[left] = places[left] = next, wanted[left] = left, own[left] = own[i];
      if (held) memcpy(given + left * width, f->states + row * width, width * sizeof *given);
      ++left;
    }
    active = left;
    now.rows = now.num_wanted = left, now.depth = 0;
    now.ids = ids, now.slots = slots, now.positions = positions, now.places = places, now.wanted = wanted;
    now.given = given;
  }
  free(numbers);
  free(own);
  free(given);
  return failed;
}
