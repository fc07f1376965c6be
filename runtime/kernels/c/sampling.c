// Choosing a token (runtime/sampling.py says what is done here, and gives the same bits).
//
// A row is read once for the largest score of each chunk. Cuts look only at chunks that have what
// they search. A race reads all scores again, and hashes each token; only few can still win, and are
// looked at closely. Roundings of what merely narrows a search do not matter, and all else is float64.

#include "sampling.h"

#include <float.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "errors.h"
#include "mathematics.h"
#include "threads.h"

enum { CHUNK = 64, DOUBLES = VECTOR_BYTES / 8, AT_ONCE = 4, GROUP = AT_ONCE * DOUBLES, FEW = 1024, STEPS = 4096 };
enum { HIGH = 4, LOW = 5 };  // uses of a position's noise

typedef double dvec __attribute__((vector_size(VECTOR_BYTES)));
typedef int64_t lvec __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t uvec __attribute__((vector_size(VECTOR_BYTES)));
typedef float half_vec __attribute__((vector_size(VECTOR_BYTES / 2)));

INLINE int any(ivec x) {
#if VECTOR_BYTES == 64
  return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#elif VECTOR_BYTES == 32
  return !_mm256_testz_si256((__m256i)x, (__m256i)x);
#else
  const lvec y = (lvec)x;
  return (y[0] | y[1]) != 0;
#endif
}

typedef struct {
  const choice *how;
  const float *scores;
  int vocab, first;       // the first token with the largest score
  float largest, *bests;  // the largest of each chunk
  double inverse;         // 1 / temperature
  float last;             // the last token that stays: its score and id
  int last_id;
  uint64_t *ranked;  // tokens in order, as keys
  int num_ranked, is_beginning;  // whether of all of them
} score_row;

// ------------------------------------------------------------------------------------ weights
// exp(x), x <= 0, of several vectors at once, as a CPU cannot look far ahead: runtime/sampling.py's steps.
INLINE void exp_of(dvec *x, int count) {
  static const double SERIES[] = {1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1, 1};
  dvec r[AT_ONCE], p[AT_ONCE];
  lvec counts[AT_ONCE], scale[AT_ONCE];
#define EACH_OF _Pragma("GCC unroll 4") for (int j = 0; j < count; ++j)
  EACH_OF {
    counts[j] = (lvec)(x[j] > -700.0);
    const dvec y = (dvec)((counts[j] & (lvec)x[j]) | (~counts[j] & (lvec)(-700.0 - (dvec){})));
    const dvec shifted = y * 1.4426950408889634 + 0x1.8p52, n = shifted - 0x1.8p52;
    scale[j] = ((lvec)shifted << 52) + (lvec)(1.0 - (dvec){});  // 2ⁿ
    r[j] = y - n * 0.693147180369123816490;
    r[j] = r[j] - n * 1.90821492927058770002e-10;
    p[j] = 1.0 / 3628800 - (dvec){};
  }
  _Pragma("GCC unroll 10") for (int k = 0; k < 10; ++k) EACH_OF p[j] = p[j] * r[j] + SERIES[k];
  EACH_OF x[j] = (dvec)((lvec)(p[j] * (dvec)scale[j]) & counts[j]);
}

// Of the group of tokens from `first` on; what lies behind the last one weighs 0.
INLINE void weights_at(const score_row *r, int first, dvec *weights) {
  const float *scores = r->scores + first;
  float last[GROUP];
  if (r->vocab - first < GROUP) {
    for (int j = 0; j < GROUP; ++j) last[j] = j < r->vocab - first ? scores[j] : -INFINITY;
    scores = last;
  }
  _Pragma("GCC unroll 4") for (int j = 0; j < AT_ONCE; ++j) {
    half_vec s;
    memcpy(&s, scores + j * DOUBLES, sizeof s);
    weights[j] = (__builtin_convertvector(s, dvec) - (double)r->largest) * r->inverse;
  }
  exp_of(weights, AT_ONCE);
}

static double weight_of(const score_row *r, float score) {
  dvec x = ((double)score - (double)r->largest) * r->inverse - (dvec){};
  exp_of(&x, 1);
  return x[0];
}

INLINE lvec wholes_of(dvec weights) {  // in units of 2⁻⁴⁰, to the nearest, ties to even
  return (lvec)(weights * 0x1p40 + 0x1p52) - (lvec)(0x1p52 - (dvec){});
}

static int64_t whole_sum(const score_row *r) {
  lvec sums[AT_ONCE] = {};
  int64_t sum = 0;
  for (int i = 0; i < r->vocab; i += GROUP) {
    dvec weights[AT_ONCE];
    weights_at(r, i, weights);
    _Pragma("GCC unroll 4") for (int j = 0; j < AT_ONCE; ++j) sums[j] += wholes_of(weights[j]);
  }
  for (int j = 0; j < GROUP; ++j) sum += sums[j / DOUBLES][j % DOUBLES];
  return sum;
}

// -------------------------------------------------------------------------------- the row's order
// Reads the row. Returns 1, or what went wrong.
static int64_t begin(score_row *r, const choice *how, const float *scores, int vocab) {
  const int num_chunks = (vocab + CHUNK - 1) / CHUNK;
  *r = (score_row){.how = how, .scores = scores, .vocab = vocab, .last = -INFINITY, .last_id = INT_MAX};
  if (!(r->bests = malloc((size_t)num_chunks * sizeof(float)))) return NO_MEMORY;
  ilanes nothing = iall(0);
  float largest = -INFINITY;
  int at = 0;
  for (int c = 0; c < num_chunks; ++c) {
    const int end = c * CHUNK + CHUNK < vocab ? c * CHUNK + CHUNK : vocab;
    lanes best = all(-INFINITY);
    for (int i = c * CHUNK; i < end; i += LANES) {
      lanes x = load_some(scores + i, end - i);
      if (end - i < LANES) x = pick(less(numbered(0), all((float)(end - i))), x, all(-INFINITY));
      best = larger(best, x);
      nothing = either(nothing, is_nan(x));
    }
    r->bests[c] = largest16(best);
    if (r->bests[c] > largest) largest = r->bests[c], at = c;
  }
  int bad = !(largest > -INFINITY && largest < INFINITY);
  EACH bad |= any(nothing.v[i]);
  if (bad) return NO_NUMBERS;
  for (r->first = at * CHUNK; scores[r->first] != largest;) ++r->first;
  r->largest = largest;
  r->inverse = 1 / how->temperature;
  return 1;
}

static void end(score_row *r) {
  free(r->bests);
  free(r->ranked);
}

// Scores below the largest one, in steps.
typedef struct { float largest, scale; } steps;
INLINE int step_of(const steps *a, float score) {
  const float step = (a->largest - score) * a->scale;
  return step < STEPS - 1 ? (int)step : STEPS - 1;
}
static float step_end(const steps *a, int step) {  // the smallest score that is not behind it
  float beyond = -FLT_MAX, within = a->largest;
  if (step >= STEPS - 1) return -INFINITY;
  for (float middle; (middle = beyond / 2 + within / 2) > beyond && middle < within;)
    if (step_of(a, middle) <= step) within = middle;
    else beyond = middle;
  return within;
}

// A score that `count` tokens reach, and not many more.
static float bound(const score_row *r, int count) {
  const int num_chunks = (r->vocab + CHUNK - 1) / CHUNK;
  float least = r->largest;
  int counts[STEPS] = {0}, step = 0;
  if (count > num_chunks) return -INFINITY;
  for (int c = 0; c < num_chunks; ++c)
    if (r->bests[c] < least && r->bests[c] > -INFINITY) least = r->bests[c];
  const steps a = {r->largest, (STEPS - 1) / (r->largest - least)};
  for (int c = 0; c < num_chunks; ++c) ++counts[step_of(&a, r->bests[c])];
  for (int seen = counts[0]; seen < count;) seen += counts[++step];
  return step_end(&a, step);
}

// Keys rise where scores fall, and then with the id.
INLINE uint64_t key_of(float score, int id) {
  const float s = score + 0.0f;  // -0 is 0
  uint32_t bits;
  memcpy(&bits, &s, 4);
  bits ^= bits >> 31 ? 0 : 0x7fffffff;
  return (uint64_t)bits << 32 | (uint32_t)id;
}
INLINE float score_of(const score_row *r, uint64_t key) { return r->scores[(uint32_t)key]; }

static void sort(uint64_t *keys, uint64_t *spare, int count) {  // by score; ids stay as they come
  for (int shift = 32; shift < 64; shift += 8) {
    int begins[257] = {0};
    for (int i = 0; i < count; ++i) ++begins[(keys[i] >> shift & 255) + 1];
    for (int i = 0; i < 256; ++i) begins[i + 1] += begins[i];
    for (int i = 0; i < count; ++i) spare[begins[keys[i] >> shift & 255]++] = keys[i];
    uint64_t *sorted = spare;
    spare = keys, keys = sorted;
  }
}

// Find the tokens with scores from `low` to below `high`, in order. Returns whether there was memory.
static int find(score_row *r, float low, float high) {
  int capacity = 0, count = 0;
  for (int c = 0; c * CHUNK < r->vocab; ++c) capacity += r->bests[c] >= low ? CHUNK : 0;
  free(r->ranked);
  r->num_ranked = 0;
  if (!(r->ranked = malloc(2 * (size_t)capacity * sizeof *r->ranked))) return 0;
  for (int c = 0; c * CHUNK < r->vocab; ++c) {
    if (!(r->bests[c] >= low)) continue;
    const int stop = c * CHUNK + CHUNK < r->vocab ? c * CHUNK + CHUNK : r->vocab;
    for (int i = c * CHUNK; i < stop; ++i) {
      if (i % PER_VECTOR == 0 && i + PER_VECTOR <= stop) {
        vec x;
        memcpy(&x, r->scores + i, sizeof x);
        if (!any((x >= low) & (x < high))) { i += PER_VECTOR - 1; continue; }
      }
      r->ranked[count] = key_of(r->scores[i], i);
      count += r->scores[i] >= low && r->scores[i] < high;
    }
  }
  sort(r->ranked, r->ranked + capacity, count);
  r->num_ranked = count;
  r->is_beginning = high > r->largest;
  return 1;
}

// --------------------------------------------------------------------------------------- cuts
INLINE int64_t whole_at(const score_row *r, int i) { return wholes_of(weight_of(r, score_of(r, r->ranked[i])) - (dvec){})[0]; }

// How many of the first `count` ranked tokens have less than `limit` before them. `before`: what
// weighs more than they, and then what weighs more than the others.
static int nucleus(const score_row *r, int count, double limit, int64_t *before) {
  int i = 0;
  for (; i < count && (double)*before < limit; ++i) *before += whole_at(r, i);
  return i;
}

// Where a nucleus of many tokens ends: scores from `low` to below `high`, and what lies before them.
static int64_t border(const score_row *r, double limit, float *low, float *high) {
  const steps a = {r->largest, (float)((STEPS - 1) / 28.5 * r->inverse)};  // exp(-28.5) is nothing
  int64_t masses[STEPS] = {0}, before = 0;
  int step = 0;
  for (int i = 0; i < r->vocab; i += GROUP) {
    dvec weights[AT_ONCE];
    weights_at(r, i, weights);
    for (int j = 0; j < GROUP && i + j < r->vocab; ++j)
      masses[step_of(&a, r->scores[i + j])] += wholes_of(weights[j / DOUBLES])[j % DOUBLES];
  }
  while (step < STEPS - 1 && (double)(before + masses[step]) < limit) before += masses[step++];
  *low = step_end(&a, step);
  *high = step ? step_end(&a, step - 1) : INFINITY;
  return before;
}

// Find the last token that top-k and top-p let stay. Returns whether there was memory.
static int cut(score_row *r) {
  const int k = r->how->top_k, by_k = 0 < k && k < r->vocab;
  if (!by_k && r->how->top_p >= 1) return 1;
  float low = bound(r, by_k ? k : r->vocab / (9 * CHUNK) + 1), high = INFINITY;
  if (!find(r, low, high)) return 0;
  int count = r->num_ranked;
  if (by_k)
    for (count = k; count < r->num_ranked && score_of(r, r->ranked[count]) == score_of(r, r->ranked[k - 1]);) ++count;
  if (r->how->top_p < 1) {
    int64_t sum = 0, before = 0;
    if (!by_k) sum = whole_sum(r);
    for (int i = 0; by_k && i < count; ++i) sum += whole_at(r, i);
    const double limit = r->how->top_p * (double)sum;
    int stays = nucleus(r, count, limit, &before);
    if (!by_k && (double)before < limit && count < r->vocab) {
      before = border(r, limit, &low, &high);
      if (!find(r, low, high)) return 0;
      stays = nucleus(r, r->num_ranked, limit, &before);
    }
    count = stays ? stays : 1;
  }
  r->last = score_of(r, r->ranked[count - 1]);
  r->last_id = (int)(uint32_t)r->ranked[count - 1];
  r->num_ranked = count;
  return 1;
}

INLINE int is_in(const score_row *r, float score, int id) {
  return score > r->last || (score == r->last && id <= r->last_id);
}

// ---------------------------------------------------------------------------------------- noise
static uint64_t scrambled(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return x ^ x >> 31;
}

INLINE uvec hashes(uvec ids, uint64_t key) {
  uvec x = (ids ^ (uint32_t)key) * 0x7FEB352Du;
  x = ((x ^ x >> 15) + (uint32_t)(key >> 32)) * 0x846CA68Bu;
  return (x ^ x >> 16) * 0x9E3779B1u;
}
INLINE double hash(int id, uint64_t key) { return hashes((uint32_t)id - (uvec){}, key)[0]; }

static double minus_log(double v) {  // −log(1 − v); the steps of runtime/sampling.py's _minus_log
  const double rest = 1 - v > 0x1p-54 ? 1 - v : 0x1p-54;
  int k;
  if (frexp(rest, &k) < 0.70710678118654757) --k;
  const double f = k ? ldexp(rest, -k) - 1 : -v, s = f / (2 + f), square = s * s;
  double series = 2.0 / 19;
  for (int i = 17; i > 0; i -= 2) series = series * square + 2.0 / i;
  return -(k * 0.693147180559945309417 + s * series);
}

// ----------------------------------------------------------------------------------------- race
typedef struct {
  const score_row *r;
  uint64_t high, low;  // keys
  double time;         // of the fastest one so far
  int token;
  float limit;  // of the logarithm of an e that is as fast for a weight of 1, in the units below
} race;

static void run(race *a, int id) {
  const double weight = weight_of(a->r, a->r->scores[id]);
  if (!(weight >= a->r->how->min_p && weight > 0)) return;
  const double low = hash(id, a->low) + 0.5, v = hash(id, a->high) * 0x1p-32 + low * 0x1p-64;
  const double time = minus_log(v) / weight;
  if (time > a->time || (time == a->time && id > a->token)) return;
  a->time = time, a->token = id;
  a->limit = (float)(158.01 + log2(time));
}

// Which of some tokens may still win. An e is at least v, and that at least ⌊high / 2⌋ · 2⁻³¹. The
// bits of a float, read as an integer, are 2²³ times its logarithm to the base 2 (which is at most
// .09 more) plus 127: so 158 on the other side, and a little for roundings.
INLINE ivec may_win(const race *a, uvec ids, const float *scores, float factor) {
  vec s;
  memcpy(&s, scores, sizeof s);
  const ivec half = (ivec)(hashes(ids, a->high) >> 1);
  const vec bits = __builtin_convertvector((ivec)__builtin_convertvector(half, vec), vec);
  return bits * 0x1p-23f <= (s - a->r->largest) * factor + a->limit;
}

static int winner(const score_row *r, int64_t position) {
  const uint64_t key = scrambled(r->how->seed ^ (uint64_t)position);
  race a = {r, scrambled(key + HIGH), scrambled(key + LOW), INFINITY, INT_MAX, INFINITY};
  run(&a, r->first);
  if (r->ranked && r->is_beginning && r->num_ranked <= FEW) {
    for (int i = 0; i < r->num_ranked; ++i) run(&a, (int)(uint32_t)r->ranked[i]);
    return a.token;
  }
  enum { VECTORS_OF_CHUNK = CHUNK / PER_VECTOR };
  const float factor = (float)(1.4426950408889634 * r->inverse);
  uvec ids;
  for (int j = 0; j < PER_VECTOR; ++j) ids[j] = (uint32_t)j;
  int i = 0;
  for (; i + CHUNK <= r->vocab; i += CHUNK) {
    ivec able[VECTORS_OF_CHUNK], some = {};
    for (int g = 0; g < VECTORS_OF_CHUNK; ++g, ids += PER_VECTOR)
      some |= able[g] = may_win(&a, ids, r->scores + i + g * PER_VECTOR, factor);
    if (!any(some)) continue;
    const int32_t *is_able = (const int32_t *)able;
    for (int j = 0; j < CHUNK; ++j)
      if (is_able[j] && is_in(r, r->scores[i + j], i + j)) run(&a, i + j);
  }
  for (; i < r->vocab; ++i)
    if (is_in(r, r->scores[i], i)) run(&a, i);
  return a.token;
}

// ---------------------------------------------------------------------------- what others call
int64_t choose(const choice *how, const float *scores, int vocab, int64_t position) {
  score_row r;
  int64_t token = begin(&r, how, scores, vocab);
  if (token > 0) {
    token = r.first;
    if (how->temperature >= 1e-6) token = cut(&r) ? winner(&r, position) : NO_MEMORY;
  }
  end(&r);
  return token;
}

// The tokens that stay, by id: how many, with their weights.
int64_t survivors(const choice *how, const float *scores, int vocab, double *weights, int64_t *ids) {
  score_row r;
  int64_t count = begin(&r, how, scores, vocab);
  if (count > 0) count = cut(&r) ? 0 : NO_MEMORY;
  for (int c = 0; count >= 0 && c * CHUNK < vocab; ++c) {
    if (r.bests[c] < r.last) continue;
    const int stop = c * CHUNK + CHUNK < vocab ? c * CHUNK + CHUNK : vocab;
    for (int i = c * CHUNK; i < stop; i += GROUP) {
      dvec group[AT_ONCE];
      double *const each = (double *)group;
      const int left = stop - i < GROUP ? stop - i : GROUP;
      weights_at(&r, i, group);
      for (int j = 0; j < left; ++j) {
        weights[count] = each[j];
        ids[count] = i + j;
        count += each[j] >= how->min_p && is_in(&r, scores[i + j], i + j);
      }
    }
  }
  end(&r);
  return count;
}

// The first `most` of them, in order; `sum` is what all weigh, where it is not NULL and nothing is cut.
int64_t leaders(const choice *how, const float *scores, int vocab, int most, double *weights, int64_t *ids, double *sum) {
  score_row r;
  int64_t count = begin(&r, how, scores, vocab);
  if (count > 0) {
    count = cut(&r) && find(&r, bound(&r, most < vocab ? most : vocab), INFINITY) ? 0 : NO_MEMORY;
    for (int i = 0; count >= 0 && i < r.num_ranked && count < most; ++i) {
      const int id = (int)(uint32_t)r.ranked[i];
      weights[count] = weight_of(&r, scores[id]);
      ids[count] = id;
      count += weights[count] >= how->min_p && is_in(&r, scores[id], id);
    }
    if (sum) *sum = (double)whole_sum(&r) * 0x1p-40;
  }
  end(&r);
  return count;
}

// ------------------------------------------------------------------------------------- scores
typedef struct {
  const float *scores;  // [rows, vocab]
  const int64_t *tokens;
  int rows, vocab, most;
  float *logprobs, *top_logprobs;  // [rows], [rows, most]
  int64_t *ranks, *top;
  atomic_int result;
} score_job;

static const choice plain = {.temperature = 1, .top_p = 1};

static int score(const score_job *j, int row) {
  const float *scores = j->scores + (size_t)row * (size_t)j->vocab, own = scores[j->tokens[row]];
  score_row r;
  int result = (int)begin(&r, &plain, scores, j->vocab);
  if (result > 0) {
    const double log_sum = (double)r.largest + log((double)whole_sum(&r) * 0x1p-40);
    int above = 0;
    for (int i = 0; i < j->vocab; ++i) above += scores[i] > own;
    j->ranks[row] = 1 + above;
    j->logprobs[row] = (float)(own - log_sum);
    result = !j->most || find(&r, bound(&r, j->most), INFINITY) ? 0 : NO_MEMORY;
    for (int i = 0; result >= 0 && i < j->most; ++i) {
      const size_t at = (size_t)row * (size_t)j->most + (size_t)i;
      j->top[at] = (uint32_t)r.ranked[i];
      j->top_logprobs[at] = (float)(score_of(&r, r.ranked[i]) - log_sum);
    }
  }
  end(&r);
  return result;
}

static void score_some(void *task) {
  score_job *j = task;
  for (int row, result; take(j->rows, 1, &row) > 0;)
    if ((result = score(j, row)) < 0) atomic_store(&j->result, result);
}

// Log-probabilities of a token in each row, its rank, and the `most` likeliest ones. Returns 0, or what went wrong.
int score_rows(const float *scores, int rows, int vocab, const int64_t *tokens, int most, float *logprobs, int64_t *ranks,
               int64_t *top, float *top_logprobs, int threads) {
  score_job j = {scores, tokens, rows, vocab, most, logprobs, top_logprobs, ranks, top, 0};
  run_in_threads(threads, score_some, &j);
  return atomic_load(&j.result);
}

// In float32 and in one reading, as a text's controller asks for each token: 1 / Σ exp(score − own).
double confidence(const float *scores, int vocab, int token) {
  const lanes own = all(scores[token]);
  lanes sums[AT_ONCE] = {};
  int i = 0;
  for (; i + AT_ONCE * LANES <= vocab; i += AT_ONCE * LANES)
    _Pragma("GCC unroll 4") for (int j = 0; j < AT_ONCE; ++j)
      sums[j] = add(sums[j], exponential(sub(load(scores + i + j * LANES), own)));
  double sum = 0;
  for (int j = 0; j < AT_ONCE; ++j) sum += sum16(sums[j]);
  for (; i < vocab; i += LANES) {
    const lanes x = exponential(sub(load_some(scores + i, vocab - i), own));
    sum += sum16(pick(less(numbered(0), all((float)(vocab - i))), x, all(0)));
  }
  return sum > 0 && sum < INFINITY ? 1 / sum : 0;
}
