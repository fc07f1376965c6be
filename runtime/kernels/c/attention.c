// Attention whose bits depend on a row and the positions of its keys alone.
//
// A score is a sum over a head's numbers in rising order. Keys are taken 256 at a time, counted from
// the text's first position: of each such block a row has its largest score, the sum of exponentials
// (in 16 lanes by position) and the sum of values, keys in rising order. Blocks are merged in
// rising order, whoever computed them. What a row does not see it does not read, wherever it lies: a token
// of a branch has the bits of a chain. A key is read once for all rows of a group and all queries of its head.

#include "attention.h"

#include <stdlib.h>

#include "errors.h"
#include "mathematics.h"
#include "threads.h"

enum { CHUNK = 64 };  // keys whose numbers are turned around at once

// ------------------------------------------------------------------------------------- turned keys

// Two vectors number by number in turn: the lower halves, or the upper ones from `first` on.
#define PAIR(first, l) (first) + (l), PER_VECTOR + (first) + (l)
#define FOUR(first, l) PAIR(first, l), PAIR(first, (l) + 1)
#if VECTOR_BYTES == 64
#define IN_TURN(first) FOUR(first, 0), FOUR(first, 2), FOUR(first, 4), FOUR(first, 6)
#elif VECTOR_BYTES == 32
#define IN_TURN(first) FOUR(first, 0), FOUR(first, 2)
#else
#define IN_TURN(first) FOUR(first, 0)
#endif
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

// Rows become columns: one half of them is shuffled into the other until each has met all.
INLINE void turn(vec x[PER_VECTOR]) {
  enum { HALVES = PER_VECTOR / 2 };
  _Pragma("GCC unroll 4") for (int met = 1; met < PER_VECTOR; met *= 2) {
    vec y[PER_VECTOR];
    _Pragma("GCC unroll 8") for (int j = 0; j < HALVES; ++j) {
      y[2 * j] = SHUFFLE(x[j], x[HALVES + j], IN_TURN(0));
      y[2 * j + 1] = SHUFFLE(x[j], x[HALVES + j], IN_TURN(HALVES));
    }
    memcpy(x, y, sizeof y);
  }
}

// Up to CHUNK keys [count, width] -> [width, CHUNK].
static void turn_keys(const uint8_t *keys, int is_half, int count, int width, float *turned) {
  const size_t size = is_half ? 2 : 4;
  for (int j = 0; j < count; j += PER_VECTOR)
    for (int i = 0; i < width; i += PER_VECTOR) {
      const uint8_t *from = keys + ((size_t)j * width + i) * size;
      size_t step = width * size;
      uint8_t edge[PER_VECTOR * 64];
      if (count - j < PER_VECTOR || width - i < LANES) {  // nothing is read that is not there
        const int left = width - i < LANES ? width - i : LANES;
        memset(edge, 0, sizeof edge);
        for (int r = 0; r < PER_VECTOR && j + r < count; ++r) memcpy(edge + r * 64, from + r * step, left * size);
        from = edge, step = 64;
      }
      vec square[PER_VECTOR];
      _Pragma("GCC unroll 16") for (int r = 0; r < PER_VECTOR; ++r, from += step) {
        PREFETCH(from, 4096);
        square[r] = (is_half ? load_wide((const uint16_t *)from) : load((const float *)from)).v[0];
      }
      turn(square);
      for (int r = 0; r < PER_VECTOR && i + r < width; ++r)
        memcpy(turned + (size_t)(i + r) * CHUNK + j, &square[r], VECTOR_BYTES);
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
} attention_task;

// Scores or sums of values of some rows over the positions from `at` to `end`. Meanwhile comes what is read next.
static void run_over(const attention_task *w, int first_row, int row, int rows, int64_t at, int64_t end, int is_scores) {
  const block *b = w->a->b;
  const size_t size = b->is_half ? 2 : 4, key = b->width * size, value = b->value_width * size, sums = partial_floats(b);
  const int first = row * w->groups, count = rows * w->groups;
  const float *queries = w->queries + (size_t)first * b->width;
  for (int n; at < end; at += n) {
    const int64_t place = place_of(w->a, first_row + row, at);
    float *scores = w->scores + (size_t)first * KEYS + (at - w->begin);
    n = run_length(w->a, first_row + row, at, end);
    if (is_scores) {
      n = n < CHUNK ? n : CHUNK;
      turn_keys(w->keys + place * key, b->is_half, n, b->width, w->turned);
      multiply_floats(&(product){count, n, b->width, queries, b->width, w->turned, CHUNK, 0, scores, KEYS, 0,
                                 w->values + place * value, n * value});
    } else {
      multiply_floats(&(product){count, b->value_width, n, scores, KEYS, w->values + place * value, b->value_width, b->is_half,
                                 w->sums + first * sums, sums, 1, w->keys + (place + n) * key, n * key});
    }
  }
}

// Which of sixteen scores from `at` on do not count.
INLINE ilanes unseen(int at, int begin, int end) {
  const lanes where = numbered((float)at);
  return either(less(where, all((float)begin)), less(all((float)end - 0.5f), where));
}

// A query's scores to exponentials of their distance from the largest. Not seen: 0.
static void soften(const block *b, float *scores, int begin, int end, float *largest, float *sum) {
  lanes most = all(-INFINITY), total = all(0);
  const int first = begin / LANES * LANES;
#define HIDE(x, at, hidden) if (at < begin || end < at + LANES) x = pick(unseen(at, begin, end), all(hidden), x)
  for (int at = first; at < end; at += LANES) {
    lanes x = load(scores + at);
    if (b->softcap != 0) x = mul(tanh16(over(x, all(b->softcap))), all(b->softcap));
    HIDE(x, at, -INFINITY);
    store(scores + at, x);
    most = larger(most, x);
  }
  const float top = largest16(most);
  for (int at = first; at < end; at += LANES) {
    lanes x = exponential(sub(load(scores + at), all(top)));
    HIDE(x, at, 0);
    store(scores + at, x);
    total = add(total, x);
  }
  *largest = top, *sum = sum16(total);
}

// The partial results of a group at the block of keys from `begin` on: [rows · groups, partial_floats].
static void partial(const attention_task *w, const group *g) {
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
static void merge(const block *b, float *into, const float *next) {
  const int wide = padded(b->value_width);
  if (next[wide + 1] == 0) return;
  if (into[wide + 1] == 0) {
    memcpy(into, next, (size_t)partial_floats(b) * 4);
    return;
  }
  const float top = into[wide] < next[wide] ? next[wide] : into[wide];
  const lanes old = exponential(all(into[wide] - top)), other = exponential(all(next[wide] - top));
  for (int i = 0; i < wide; i += LANES) store(into + i, fma16(load(into + i), old, mul(load(next + i), other)));
  const lanes sum = fma16(all(into[wide + 1]), old, mul(all(next[wide + 1]), other));
  float t[LANES];
  store(t, sum);
  into[wide] = top, into[wide + 1] = t[0];
}

static void finish(const attention *a, int row, int head, const float *sums) {
  const block *b = a->b;
  const int width = b->value_width, wide = padded(width);
  float *attended = a->attended + ((size_t)row * b->heads + head) * width;
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
size_t num_partials(const attention *a, int threads) {
  return a->num_groups * a->b->kv_heads < 4 * threads ? partials_before(a, a->num_groups) * partial_floats(a->b) : 0;
}

size_t room_floats(const block *b) {
  const size_t most = (size_t)GROUP_ROWS * (b->heads / b->kv_heads);
  return padded((int)(most * (b->width + KEYS + 2 * partial_floats(b)) + (size_t)b->width * CHUNK));
}

static int tasks_of(const attention *a, const group *g) {  // of one head of keys
  int first;
  return a->partials ? blocks_of(a, g, &first) : 1;
}

// Blocks of keys of one head lie side by side, and so do their tasks: what is read next can be fetched ahead.
static void run_task(const attention *a, int task, float *room) {
  const block *b = a->b;
  const group *g = a->groups;
  for (; task >= tasks_of(a, g) * b->kv_heads; ++g) task -= tasks_of(a, g) * b->kv_heads;
  const int groups = b->heads / b->kv_heads, size = partial_floats(b), most = GROUP_ROWS * groups, queries = g->count * groups;
  const int head = task / tasks_of(a, g);
  int first;
  const int count = blocks_of(a, g, &first);
  const size_t bytes = b->is_half ? 2 : 4, slot = (size_t)a->f->slots[g->first] * b->kv_heads + head;
  float *scaled = room, *scores = scaled + (size_t)most * b->width, *sums = scores + (size_t)most * KEYS, *merged = sums + (size_t)most * size;
  for (int q = 0; q < queries; ++q) {
    const float *from = a->queries + ((size_t)(g->first + q / groups) * b->heads + head * groups + q % groups) * b->width;
    for (int i = 0; i < b->width; i += LANES)
      store_some(scaled + (size_t)q * b->width + i, mul(load_some(from + i, b->width - i), all(b->scaling)), b->width - i);
  }
  attention_task w = {a, (const uint8_t *)b->keys + slot * b->capacity * b->width * bytes,
            (const uint8_t *)b->values + slot * b->capacity * b->value_width * bytes,
            scaled, scores, merged + (size_t)most * size, sums, 0, groups};
  const int begin = a->partials ? task % count : 0, end = a->partials ? begin + 1 : count;
  if (a->partials) merged = a->partials + (partials_before(a, (int)(g - a->groups)) + ((size_t)begin * b->kv_heads + head) * queries) * size;
  for (int i = begin; i < end; ++i) {
    w.begin = (int64_t)(first + i) * KEYS, w.sums = i == begin ? merged : sums;
    partial(&w, g);
    for (int q = 0; q < queries && i > begin; ++q) merge(b, merged + (size_t)q * size, sums + (size_t)q * size);
  }
  for (int q = 0; q < queries && !a->partials; ++q)
    finish(a, g->first + q / groups, head * groups + q % groups, merged + (size_t)q * size);
}

void attend(const attention *a) {
  float *room = a->rooms + (size_t)thread_number() * room_floats(a->b);
  int total = 0;
  for (int i = 0; i < a->num_groups; ++i) total += tasks_of(a, a->groups + i) * a->b->kv_heads;
  for (int begin, some; (some = take(total, a->partials ? fair_share(total, 3) : 1, &begin)) > 0;)
    for (int task = begin; task < begin + some; ++task) run_task(a, task, room);
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
    const size_t query = (size_t)(h / groups) * queries + (row - g->first) * groups + h % groups;
    float *merged = sums + query * size;
    for (int i = 1; i < count; ++i) merge(b, merged, sums + ((size_t)i * b->kv_heads * queries + query) * size);
    finish(a, row, h, merged);
  }
}

// ------------------------------------------------------------------------------- attention by itself

static void run(void *task) {
  const attention *a = task;
  attend(a);
  meet();
  for (int row; take(a->f->rows, 1, &row) > 0;) collect(a, row);
}

// Of a module that makes queries, keys and values itself; see `attention`. Returns 0 or NO_MEMORY.
int run_attention(const block *b, const batch *f, const float *queries, float *attended, int threads) {
  attention a = {.b = b, .f = f, .queries = queries, .attended = attended};
  group *groups = malloc((size_t)f->rows * sizeof *groups);
  if (!groups) return NO_MEMORY;
  a.groups = groups, a.num_groups = make_groups(f, groups);
  const size_t rooms = (size_t)threads * room_floats(b);
  const size_t partials = num_partials(&a, threads);
  if (!posix_memalign((void **)&a.rooms, 64, (rooms + partials) * 4 + 64)) {
    a.partials = partials ? a.rooms + rooms : NULL;
    run_in_threads(threads, run, &a);
  }
  free(a.rooms);
  free(groups);
  return a.rooms ? 0 : NO_MEMORY;
}
