#include "recurrent.h"

#include <stdlib.h>

#include "errors.h"
#include "mathematics.h"
#include "threads.h"

enum { PARTS = 4, COLUMNS = PARTS * LANES, MUCH = 1 << 21 };  // less is done sooner than threads wake
#define PART for (int j = 0; j < PARTS; ++j)

// --------------------------------------------------------------------------------- convolution
// The numbers `back` tokens before row `row`; NULL: nothing.
INLINE const float *tap(const convolution *c, const conv_text *p, int row, int back) {
  const int at = row - back;
  if (at >= 0) return p->x + (size_t)at * p->x_step;
  return p->before ? p->before + (size_t)(at + c->taps - 1) * c->channels : NULL;
}

static void some_channels(const convolution *c, const conv_text *p, int first, int end) {
  const int old = c->taps - 1;
  for (int row = 0; row < p->rows; ++row)
    for (int at = first; at < end; at += LANES) {
      lanes y = all(0);
      for (int i = 0; i < c->taps; ++i) {
        const float *x = tap(c, p, row, old - i), *weight = c->weight + (size_t)i * c->channels;
        if (x) y = fma16(load_some(weight + at, end - at), load_some(x + at, end - at), y);
      }
      if (c->bias) y = add(y, load_some(c->bias + at, end - at));
      if (c->has_silu) y = mul(y, sigmoid(y));
      store_some(p->y + (size_t)row * p->y_step + at, y, end - at);
    }
  for (int at = first; at < end; at += LANES) {
    lanes after[c->taps];
    for (int i = 0; i < old; ++i) {  // all are read before one is written: `after` may be `before`
      const float *x = tap(c, p, p->rows, old - i);
      after[i] = x ? load_some(x + at, end - at) : all(0);
    }
    for (int i = 0; i < old; ++i) store_some(p->after + (size_t)i * c->channels + at, after[i], end - at);
  }
}

void convolve(const convolution *c, const conv_text *texts, int count) {
  enum { SHARE = 16 * LANES };  // channels that are read together: rows lie far apart
  const int parts = (c->channels + SHARE - 1) / SHARE;
  for (int unit; take(count * parts, 1, &unit) > 0;) {
    const int first = unit % parts * SHARE, end = first + SHARE;
    some_channels(c, texts + unit / parts, first, end < c->channels ? end : c->channels);
  }
}

// ---------------------------------------------------------------------------------------- rules
// A row's numbers in the room: decays, products of keys and queries, keys, queries.
INLINE size_t row_floats(const rule *r) { return (size_t)r->heads + r->key_heads * (1 + 2 * (size_t)r->width); }
size_t room_of(const rule *r, size_t rows) { return rows * row_floats(r); }

static float sum_of_products(const float *x, const float *y, int width) {
  lanes sums = all(0);
  for (int i = 0; i < width; i += LANES) sums = fma16(load_some(x + i, width - i), load_some(y + i, width - i), sums);
  return sum16(sums);
}

static void copy_scaled(const float *x, float scale, int width, float *to) {
  for (int i = 0; i < width; i += LANES) store_some(to + i, mul(load_some(x + i, width - i), all(scale)), width - i);
}

static void prepare_row(const rule *r, const rule_input *g, int row, float *room) {
  float *decays = room, *products = decays + r->heads, *keys = products + r->key_heads;
  float *queries = keys + (size_t)r->key_heads * r->width;
  for (int h = 0; h < r->heads; h += LANES) {
    const lanes logs = load_some(g->logs + row * g->head_step + h, r->heads - h);
    store_some(decays + h, exponential(logs), r->heads - h);
  }
  for (int h = 0; h < r->key_heads; ++h) {
    const size_t at = (size_t)h * r->width;
    const float *key = g->keys + row * g->key_step + at, *query = g->queries + row * g->key_step + at;
    float key_scale = 1, query_scale = r->scale;
    if (r->has_norm) {
      key_scale = 1 / sqrtf(sum_of_products(key, key, r->width) + 1e-6f);
      query_scale *= 1 / sqrtf(sum_of_products(query, query, r->width) + 1e-6f);
    }
    copy_scaled(key, key_scale, r->width, keys + at);
    copy_scaled(query, query_scale, r->width, queries + at);
    products[h] = sum_of_products(keys + at, queries + at, r->width);
  }
}

// Some columns of a head's state over all tokens of a text.
static void some_columns(const rule *r, const rule_input *g, const float *room, int head, int first) {
  lanes held[r->width][PARTS];
  const int left = r->columns - first, key_head = head / (r->heads / r->key_heads);
  const size_t begin = (size_t)head * r->width * r->columns + first;
#define COUNT(j) (left - (j) * LANES < 0 ? 0 : left - (j) * LANES)
  for (int k = 0; k < r->width; ++k)
    PART held[k][j] = g->before ? load_some(g->before + begin + (size_t)k * r->columns + j * LANES, COUNT(j)) : all(0);
  for (int row = 0; row < g->rows; ++row, room += row_floats(r)) {
    const float *keys = room + r->heads + r->key_heads, *key = keys + (size_t)key_head * r->width;
    const float *query = key + (size_t)r->key_heads * r->width;
    const lanes decay = all(room[head]), product = all(room[r->heads + key_head]);
    const lanes beta = all(g->betas[row * g->head_step + head]);
    const size_t at = (size_t)head * r->columns + first;
    lanes by_key[PARTS], by_query[PARTS], change[PARTS];
    PART by_key[j] = by_query[j] = all(0);
    for (int k = 0; k < r->width; ++k) {
      if (r->corrects) PART by_key[j] = fma16(held[k][j], all(key[k]), by_key[j]);
      PART by_query[j] = fma16(held[k][j], all(query[k]), by_query[j]);
    }
    PART {
      const lanes value = load_some(g->values + row * g->value_step + at + j * LANES, COUNT(j));
      change[j] = mul(r->corrects ? sub(value, mul(by_key[j], decay)) : value, beta);
      const lanes out = fma16(change[j], product, mul(by_query[j], decay));
      store_some(g->out + (size_t)row * r->heads * r->columns + at + j * LANES, out, COUNT(j));
    }
    for (int k = 0; k < r->width; ++k) PART held[k][j] = fma16(change[j], all(key[k]), mul(held[k][j], decay));
  }
  for (int k = 0; k < r->width; ++k)
    PART store_some(g->after + begin + (size_t)k * r->columns + j * LANES, held[k][j], COUNT(j));
}

void step_texts(const rule *r, const rule_input *texts, int count, float *room) {
  const int groups = (r->columns + COLUMNS - 1) / COLUMNS, per_text = r->heads * groups;
  int rows = 0;
  for (int t = 0; t < count; ++t) rows += texts[t].rows;
  for (int row; take(rows, 1, &row) > 0;) {
    int t = 0, text_row = row;
    while (text_row >= texts[t].rows) text_row -= texts[t++].rows;
    prepare_row(r, texts + t, text_row, room + row * row_floats(r));
  }
  meet();
  for (int unit; take(count * per_text, 1, &unit) > 0;) {
    const int t = unit / per_text, part = unit % per_text;
    size_t before = 0;
    for (int i = 0; i < t; ++i) before += (size_t)texts[i].rows;
    some_columns(r, texts + t, room + before * row_floats(r), part / groups, part % groups * COLUMNS);
  }
}

// ------------------------------------------------------------------------------- what Python calls
typedef struct {
  const convolution *c;
  const rule *r;
  const void *texts;
  int count;
  float *room;
} job;

static void run_convolve(void *j) { convolve(((job *)j)->c, ((job *)j)->texts, ((job *)j)->count); }
static void run_step(void *j) { step_texts(((job *)j)->r, ((job *)j)->texts, ((job *)j)->count, ((job *)j)->room); }

// They return 0 or NO_MEMORY.
int apply_convolution(const convolution *c, const conv_text *texts, int count, int threads) {
  size_t rows = 0;
  for (int t = 0; t < count; ++t) rows += (size_t)texts[t].rows;
  if (c->taps > MOST_TAPS) return NO_MEMORY;
  run_in_threads(rows * c->channels * c->taps > MUCH ? threads : 1, run_convolve, &(job){.c = c, .texts = texts, .count = count});
  return 0;
}

int apply_rule(const rule *r, const rule_input *texts, int count, int threads) {
  size_t rows = 0;
  for (int t = 0; t < count; ++t) rows += (size_t)texts[t].rows;
  job j = {.r = r, .texts = texts, .count = count};
  if (r->width > WIDEST_KEY || !(j.room = malloc(room_of(r, rows) * sizeof(float) + 1))) return NO_MEMORY;
  run_in_threads(rows * r->heads * r->width * r->columns > MUCH ? threads : 1, run_step, &j);
  free(j.room);
  return 0;
}
