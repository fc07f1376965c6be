// Attention whose bits depend on a row and the positions of its keys alone.
//
// A score is a sum over a head's numbers in rising order. Keys are taken 256 at a time, counted from
// the text's first position: of each such block a row has its largest score, the sum of exponentials
// (in 16 lanes by position) and the sum of values, keys in rising order. Blocks are merged in
// rising order, whoever computed them. What a row does not see it does not read, wherever it lies: a token
// of a branch has the bits of a chain. A key is read once for all rows of a group and all queries of its head.

#define _GNU_SOURCE
#include "forward.h"

#include <stdlib.h>

#include "threads.h"

enum { CHUNK = 64 };  // keys whose numbers are turned around at once

// exp(x) for x from -87 to 87, by a polynomial on half of ln 2 to each side; exp(0) is 1.
lanes exponential(lanes x) {
  x = pick(less(x, all(-87)), all(-87), x);
  x = pick(less(all(87), x), all(87), x);
  const lanes magic = all(12582912.0f), shifted = fma16(x, all(1.44269504f), magic);
  const lanes n = sub(shifted, magic);
  const lanes r = fma16(n, all(2.12194440e-4f), fma16(n, all(-0.693359375f), x));
  lanes p = fma16(all(1.9875691500e-4f), r, all(1.3981999507e-3f));
  p = fma16(p, r, all(8.3334519073e-3f));
  p = fma16(p, r, all(4.1665795894e-2f));
  p = fma16(p, r, all(1.6666665459e-1f));
  p = fma16(p, r, all(5.0000001201e-1f));
  p = add(fma16(p, mul(r, r), r), all(1));
  ilanes power;
  EACH power.v[i] = ((ivec)shifted.v[i] - 0x4b400000 + 127) << 23;
  return mul(p, bits_as_floats(power));
}

lanes sigmoid(lanes x) { return over(all(1), add(all(1), exponential(sub(all(0), x)))); }
// log(1 + exp(x)): log(1 + t) is 2 · artanh(t / (2 + t)).
lanes softplus(lanes x) {
  const lanes t = exponential(sub(all(0), size_of(x))), s = over(t, add(all(2), t)), z = mul(s, s);
  lanes p = all(1 / 17.0f);
  for (int n = 15; n > 0; n -= 2) p = fma16(p, z, all(1 / (float)n));
  return fma16(add(s, s), p, pick(less(x, all(0)), all(0), x));
}

lanes tanh16(lanes x) { return sub(all(1), over(all(2), add(exponential(add(x, x)), all(1)))); }

// ------------------------------------------------------------------------------------- turned keys

#define LOW(l, s) ((l) & (s) ? PER_VECTOR + (l) - (s) : (l))
#define HIGH(l, s) ((l) & (s) ? PER_VECTOR + (l) : (l) + (s))
#define LIST4(F, s, l) F(l, s), F(l + 1, s), F(l + 2, s), F(l + 3, s)
#if VECTOR_BYTES == 64
#define LIST(F, s) LIST4(F, s, 0), LIST4(F, s, 4), LIST4(F, s, 8), LIST4(F, s, 12)
#elif VECTOR_BYTES == 32
#define LIST(F, s) LIST4(F, s, 0), LIST4(F, s, 4)
#else
#define LIST(F, s) LIST4(F, s, 0)
#endif
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
#define TURN_BY(s) \
  if (s < PER_VECTOR) \
    for (int j = 0; j < PER_VECTOR; ++j) \
      if (!(j & (s))) { \
        const vec one = x[j], other = x[(j + (s)) % PER_VECTOR]; \
        x[j] = SHUFFLE(one, other, LIST(LOW, (s) % PER_VECTOR)); \
        x[(j + (s)) % PER_VECTOR] = SHUFFLE(one, other, LIST(HIGH, (s) % PER_VECTOR)); \
      }

INLINE void turn(vec x[PER_VECTOR]) {  // rows become columns
  TURN_BY(1)
  TURN_BY(2)
#if VECTOR_BYTES > 16
  TURN_BY(4)
#endif
#if VECTOR_BYTES > 32
  TURN_BY(8)
#endif
}

// Up to CHUNK keys [count, width] -> [width, CHUNK].
static void turn_keys(const void *keys, int is_half, int count, int width, float *turned) {
  for (int j = 0; j < count; j += PER_VECTOR)
    for (int i = 0; i < width; i += LANES) {
      lanes rows[PER_VECTOR];
      for (int r = 0; r < PER_VECTOR; ++r) {
        const int key = j + r < count ? j + r : count - 1;
        const size_t at = (size_t)key * width + i;
        if (is_half && i + LANES <= width) rows[r] = load_wide((const uint16_t *)keys + at);
        else if (is_half) {
          float t[LANES] = {0};
          for (int k = 0; i + k < width; ++k) t[k] = wide(((const uint16_t *)keys)[at + k]);
          rows[r] = load(t);
        } else rows[r] = load_some((const float *)keys + at, width - i);
      }
      for (int v = 0; v < VECTORS; ++v) {
        vec square[PER_VECTOR];
        for (int r = 0; r < PER_VECTOR; ++r) square[r] = rows[r].v[v];
        turn(square);
        for (int r = 0; r < PER_VECTOR && i + v * PER_VECTOR + r < width; ++r)
          memcpy(turned + (size_t)(i + v * PER_VECTOR + r) * CHUNK + j, &square[r], VECTOR_BYTES);
      }
    }
}

// ----------------------------------------------------------------------- one block of keys of one group

INLINE int padded(int width) { return (width + LANES - 1) / LANES * LANES; }
INLINE int partial_floats(const block *b) { return padded(b->value_width) + LANES; }  // values; largest score, sum

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// A row sees its text's positions from `first_seen` to its end; from `base` on they lie where its line says.
INLINE int64_t first_seen(const attention *a, int row) {
  return a->b->window ? max64(0, a->f->positions[row] + 1 - a->b->window) : 0;
}
INLINE int64_t end_of(const attention *a, int row) {
  return a->b->looks_ahead ? a->f->ends[row] : a->f->positions[row] + 1;
}
INLINE int64_t base_of(const attention *a, int row) { return end_of(a, row) - a->f->depth; }
INLINE int64_t place_of(const attention *a, int row, int64_t position) {
  const int64_t base = base_of(a, row);
  return position < base ? position : a->f->line[row * a->f->depth + position - base];
}

// How many positions from `at` on, below `end`, lie side by side.
static int run_length(const attention *a, int row, int64_t at, int64_t end) {
  const int64_t base = base_of(a, row), first = place_of(a, row, at);
  int64_t next = at < base ? min64(base, end) : at + 1;
  while (next < end && place_of(a, row, next) == first + next - at) ++next;
  return (int)(next - at);
}

typedef struct {  // a group's queries of one head of keys, at one block
  const attention *a;
  const uint8_t *keys, *values;
  const float *queries;  // [rows · groups, width], scaled
  float *scores;         // [rows · groups, KEYS]
  float *turned;
  float *sums;           // [rows · groups, partial_floats]
  int64_t begin;         // of the block
  int groups;            // queries of one row
} work;

// Scores or sums of values of some rows over the positions from `at` to `end`.
static void run_over(const work *w, int first_row, int row, int rows, int64_t at, int64_t end, int is_scores) {
  const block *b = w->a->b;
  const size_t size = b->is_half ? 2 : 4;
  const int first = row * w->groups, count = rows * w->groups;
  while (at < end) {
    const int64_t place = place_of(w->a, first_row + row, at);
    int n = run_length(w->a, first_row + row, at, end);
    float *scores = w->scores + (size_t)first * KEYS + (at - w->begin);
    if (is_scores) {
      n = n < CHUNK ? n : CHUNK;
      turn_keys(w->keys + place * b->width * size, b->is_half, n, b->width, w->turned);
      multiply_floats(count, n, b->width, w->queries + (size_t)first * b->width, b->width, w->turned, CHUNK, 0, scores, KEYS, 0);
    } else {
      multiply_floats(count, b->value_width, n, scores, KEYS, w->values + place * b->value_width * size, b->value_width, b->is_half,
                      w->sums + (size_t)first * partial_floats(b), partial_floats(b), 1);
    }
    at += n;
  }
}

// A query's scores to exponentials of their distance from the largest. Not seen: 0.
static void soften(const block *b, float *scores, int begin, int end, float *largest, float *sum) {
  lanes most = all(-INFINITY), total = all(0);
  const int first = begin / LANES * LANES;
  for (int at = first; at < end; at += LANES) {
    const lanes where = numbered((float)at);
    lanes x = load(scores + at);
    if (b->softcap != 0) x = mul(tanh16(over(x, all(b->softcap))), all(b->softcap));
    ilanes hidden = either(less(where, all((float)begin)), less(all((float)end - 0.5f), where));
    x = pick(hidden, all(-INFINITY), x);
    store(scores + at, x);
    most = larger(most, x);
  }
  const float top = largest16(most);
  for (int at = first; at < end; at += LANES) {
    const lanes where = numbered((float)at);
    ilanes hidden = either(less(where, all((float)begin)), less(all((float)end - 0.5f), where));
    const lanes x = pick(hidden, all(0), exponential(sub(load(scores + at), all(top))));
    store(scores + at, x);
    total = add(total, x);
  }
  *largest = top, *sum = sum16(total);
}

// The partial results of a group at the block of keys from `begin` on: [rows · groups, partial_floats].
static void partial(const work *w, const group *g) {
  const attention *a = w->a;
  const block *b = a->b;
  const int size = partial_floats(b), wide = padded(b->value_width);
  int64_t from[GROUP_ROWS], to[GROUP_ROWS], common = w->begin, until = w->begin + KEYS;
  for (int r = 0; r < g->count; ++r) {
    const int row = g->first + r;
    from[r] = max64(first_seen(a, row), w->begin), to[r] = min64(end_of(a, row), w->begin + KEYS);
    common = max64(common, from[r]), until = min64(until, min64(to[r], base_of(a, row)));
  }
  if (until < common) until = common = w->begin + KEYS;  // each row by itself
  // What all rows see they read together, before and behind it each reads its own.
#define PASS(is_scores) \
  for (int r = 0; r < g->count; ++r) run_over(w, g->first, r, 1, from[r], min64(to[r], common), is_scores); \
  run_over(w, g->first, 0, g->count, common, until, is_scores); \
  for (int r = 0; r < g->count; ++r) run_over(w, g->first, r, 1, max64(from[r], until), to[r], is_scores);
  PASS(1)
  for (int r = 0; r < g->count; ++r)
    for (int q = r * w->groups; q < (r + 1) * w->groups; ++q) {
      float *sums = w->sums + (size_t)q * size;
      memset(sums, 0, (size_t)size * 4);
      sums[wide] = -INFINITY;
      if (from[r] < to[r])
        soften(b, w->scores + (size_t)q * KEYS, (int)(from[r] - w->begin), (int)(to[r] - w->begin), sums + wide, sums + wide + 1);
    }
  PASS(0)
}

// Into one partial result the next one: nothing, if no key is seen there.
static void merge(const block *b, float *into, const float *next, int is_first) {
  const int wide = padded(b->value_width);
  if (next[wide + 1] == 0 && !is_first) return;
  if (is_first || into[wide + 1] == 0) {
    memcpy(into, next, (size_t)partial_floats(b) * 4);
    return;
  }
  const float top = into[wide] < next[wide] ? next[wide] : into[wide];
  const lanes own = exponential(all(into[wide] - top)), other = exponential(all(next[wide] - top));
  for (int i = 0; i < wide; i += LANES) store(into + i, fma16(load(into + i), own, mul(load(next + i), other)));
  const lanes sum = fma16(all(into[wide + 1]), own, mul(all(next[wide + 1]), other));
  float t[LANES];
  store(t, sum);
  into[wide] = top, into[wide + 1] = t[0];
}

static void finish(const block *b, int head, const float *sums, float *attended) {
  const int width = b->value_width, wide = padded(width);
  lanes share = all(1), total = all(sums[wide + 1]);
  if (b->sinks) {
    const float sink = b->sinks[head], top = sums[wide] < sink ? sink : sums[wide];
    share = exponential(all(sums[wide] - top));
    total = fma16(total, share, exponential(all(sink - top)));
  }
  for (int i = 0; i < width; i += LANES) store_some(attended + i, over(mul(load(sums + i), share), total), width - i);
}

// --------------------------------------------------------------------------------- groups and threads

int make_groups(const batch *f, group *groups) {
  int count = 0;
  for (int row = 0; row < f->rows; ++row) {
    group *last = groups + count - 1;
    if (count && f->slots[row] == f->slots[last->first] && last->count < GROUP_ROWS) ++last->count;
    else groups[count++] = (group){row, 1};
  }
  return count;
}

// The blocks of keys that a group reads, from the first on.
static int blocks_of(const attention *a, const group *g, int *first) {
  int64_t begin = INT64_MAX, end = 0;
  for (int row = g->first; row < g->first + g->count; ++row)
    begin = min64(begin, first_seen(a, row)), end = max64(end, end_of(a, row));
  *first = (int)(begin / KEYS);
  return (int)((end + KEYS - 1) / KEYS) - *first;
}

// Where a group's partial results begin: [blocks, heads of keys, rows · groups, partial_floats].
static size_t partials_before(const attention *a, int number) {
  size_t count = 0;
  for (int i = 0, first; i < number; ++i)
    count += (size_t)blocks_of(a, a->groups + i, &first) * a->groups[i].count * a->b->heads;
  return count;
}
size_t num_partials(const attention *a) { return partials_before(a, a->num_groups) * partial_floats(a->b); }

size_t room_floats(const block *b) {
  const size_t most = (size_t)GROUP_ROWS * (b->heads / b->kv_heads);
  return padded((int)(most * (b->width + KEYS + 2 * partial_floats(b)) + (size_t)b->width * CHUNK));
}

void attend(const attention *a) {
  const block *b = a->b;
  const int groups = b->heads / b->kv_heads, size = partial_floats(b);
  const size_t bytes = b->is_half ? 2 : 4;
  const int most = GROUP_ROWS * groups;
  float *memory = a->rooms + (size_t)thread_number() * room_floats(b);
  int total = 0;
  for (int i = 0, first; i < a->num_groups; ++i) total += a->partials ? blocks_of(a, a->groups + i, &first) : 1;
  for (int task; take(total * b->kv_heads, 1, &task) > 0;) {
    const int head = task % b->kv_heads;
    int number = 0, left = task / b->kv_heads, first, count;
    while (left >= (count = a->partials ? blocks_of(a, a->groups + number, &first) : 1)) left -= count, ++number;
    const group *g = a->groups + number;
    const int queries = g->count * groups;
    count = blocks_of(a, g, &first);
    const size_t slot = (size_t)a->f->slots[g->first] * b->kv_heads + head;
    float *own = memory, *scores = own + (size_t)most * b->width, *sums = scores + (size_t)most * KEYS, *merged = sums + (size_t)most * size;
    for (int q = 0; q < queries; ++q) {
      const float *from = a->queries + ((size_t)(g->first + q / groups) * b->heads + head * groups + q % groups) * b->width;
      for (int i = 0; i < b->width; i += LANES)
        store_some(own + (size_t)q * b->width + i, mul(load_some(from + i, b->width - i), all(b->scaling)), b->width - i);
    }
    work w = {a, (const uint8_t *)b->keys + slot * b->capacity * b->width * bytes,
              (const uint8_t *)b->values + slot * b->capacity * b->value_width * bytes,
              own, scores, merged + (size_t)most * size, sums, 0, groups};
    if (a->partials) {
      w.sums = a->partials + (partials_before(a, number) + ((size_t)left * b->kv_heads + head) * queries) * size;
      w.begin = (int64_t)(first + left) * KEYS;
      partial(&w, g);
      continue;
    }
    for (int i = 0; i < count; ++i) {
      w.begin = (int64_t)(first + i) * KEYS;
      partial(&w, g);
      for (int q = 0; q < queries; ++q) merge(b, merged + (size_t)q * size, sums + (size_t)q * size, i == 0);
    }
    for (int q = 0; q < queries; ++q)
      finish(b, head * groups + q % groups, merged + (size_t)q * size,
             a->attended + ((size_t)(g->first + q / groups) * b->heads + head * groups + q % groups) * b->value_width);
  }
}

void collect(const attention *a, int row) {
  if (!a->partials) return;
  const block *b = a->b;
  const int groups = b->heads / b->kv_heads, size = partial_floats(b);
  int number = 0, first;
  while (row >= a->groups[number].first + a->groups[number].count) ++number;
  const group *g = a->groups + number;
  const int queries = g->count * groups, count = blocks_of(a, g, &first);
  float *sums = a->partials + partials_before(a, number) * size;
  for (int h = 0; h < b->heads; ++h) {
    const size_t own = (size_t)(h / groups) * queries + (row - g->first) * groups + h % groups;
    float *merged = sums + own * size;
    for (int i = 1; i < count; ++i) merge(b, merged, sums + ((size_t)i * b->kv_heads * queries + own) * size, 0);
    finish(b, h, merged, a->attended + ((size_t)row * b->heads + h) * b->value_width);
  }
}

// ------------------------------------------------------------------------------- attention by itself

static void run(void *given) {
  const attention *a = given;
  attend(a);
  meet();
  for (int row; take(a->f->rows, 1, &row) > 0;) collect(a, row);
}

// Of a module that makes queries, keys and values itself; see `attention`. Returns whether there was memory.
int run_attention(const block *b, const batch *f, const float *queries, float *attended, int threads) {
  attention a = {.b = b, .f = f, .queries = queries, .attended = attended};
  group *groups = malloc((size_t)f->rows * sizeof *groups);
  if (!groups) return 0;
  a.groups = groups, a.num_groups = make_groups(f, groups);
  const size_t rooms = (size_t)threads * room_floats(b);
  const size_t partials = a.num_groups * b->kv_heads < 4 * threads ? num_partials(&a) : 0;
  if (!posix_memalign((void **)&a.rooms, 64, (rooms + partials) * 4 + 64)) {
    a.partials = partials ? a.rooms + rooms : NULL;
    run_in_threads(threads, run, &a);
  }
  free(a.rooms);
  free(groups);
  return a.rooms != NULL;
}
