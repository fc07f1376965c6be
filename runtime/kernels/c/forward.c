// A whole forward in one job: all threads go through its steps together, and meet between them. In a
// step rows are shared out, or a matrix's outputs, or heads and keys. Numbers between layers are floats.

#include <math.h>
#include <stdlib.h>

#include "attention.h"
#include "errors.h"
#include "mathematics.h"
#include "threads.h"

enum { SOME = 512 };  // inputs of a row that a thread activates at once

typedef struct {
  const decoder *d;
  const batch *f;
  int num_groups;
  group *groups;
  // x: what blocks add to; y: a layer's outputs, to be normed; read: what a layer is to read
  float *x, *y, *read, *joined, *queries, *attended, *inner, *partials, *rooms, *rule_room;
  uint8_t *prepared;
  int threads;
} forward;

// Fill tables [length, width] of cos and sin, computed in double and rounded once: torch's own, in float, depend on the
// CPU, and far on their angles are wrong by 2e-4.
void tabulate(float *cosines, float *sines, int length, int width, const double *frequencies, double scale) {
  for (int i = 0; i < length; ++i)
    for (int j = 0; j < width; ++j) {
      *cosines++ = (float)(cos(i * frequencies[j]) * scale);
      *sines++ = (float)(sin(i * frequencies[j]) * scale);
    }
}

// ------------------------------------------------------------------------------------- parts of a row

static void normalise(const norm *n, const float *x, int width, float *to) {
  if (n->kind == NO_NORM) {
    if (to != x) memcpy(to, x, (size_t)width * 4);
    return;
  }
  lanes sums = all(0), mean = all(0);
  if (n->kind == LAYER_NORM) {
    for (int i = 0; i < width; i += LANES) sums = add(sums, load_some(x + i, width - i));
    mean = all(sum16(sums) / (float)width);
    sums = all(0);
  }
  for (int i = 0; i < width; i += LANES) {
    lanes part = sub(load_some(x + i, width - i), mean);
    if (width - i < LANES) part = pick(less(numbered(0), all((float)(width - i))), part, all(0));
    sums = fma16(part, part, sums);
  }
  const lanes factor = all(1 / sqrtf(sum16(sums) / (float)width + n->epsilon));
  for (int i = 0; i < width; i += LANES) {
    lanes y = mul(sub(load_some(x + i, width - i), mean), factor);
    if (n->weight) y = mul(y, load_some(n->weight + i, width - i));
    if (n->bias) y = add(y, load_some(n->bias + i, width - i));
    store_some(to + i, y, width - i);
  }
}

static void rotate(const rope *t, int64_t position, float *x) {
  const int half = t->width / 2;
  const float *cosines = t->cos + position * half, *sines = t->sin + position * half;
  for (int i = 0; i < half; i += LANES) {
    const int count = half - i;
    const lanes a = load_some(x + i, count), b = load_some(x + half + i, count);
    const lanes c = load_some(cosines + i, count), s = load_some(sines + i, count);
    const lanes first = fma16(a, c, sub(all(0), mul(b, s))), second = fma16(b, c, mul(a, s));
    store_some(x + i, first, count);
    store_some(x + half + i, second, count);
  }
}

static lanes activated(int kind, lanes x) {
  const lanes positive = pick(less(x, all(0)), all(0), x);
  switch (kind) {
    case SILU: return mul(x, sigmoid(x));
    case QUICK_GELU: return mul(x, sigmoid(mul(x, all(1.702f))));
    case GELU: return mul(mul(x, all(0.5f)), add(all(1), erf16(mul(x, all(0.70710678f)))));
    case GELU_TANH: {
      const lanes cube = fma16(mul(mul(x, x), x), all(0.044715f), x);
      return mul(x, sigmoid(mul(cube, all(1.59576912f))));
    }
    case RELU_SQUARED: return mul(positive, positive);
    default: return positive;
  }
}

// ------------------------------------------------------------------------------------------ steps

#define FOR_ROWS(row, count) for (int row; take(count, 1, &row) > 0;)

static void prepare_row(forward *w, const matrix *m, int row, const float *x) {
  prepare(m->form, m->inputs, x, w->prepared + (size_t)row * prepared_bytes(m->form, m->inputs));
}

static void enter_row(forward *w, int row) {
  const decoder *d = w->d;
  const int width = d->hidden;
  float *x = w->x + (size_t)row * width, *read = w->read + (size_t)row * 2 * width;
  const float *inputs = w->f->input_states + (size_t)row * width * (d->has_states && !w->f->ids ? 2 : 1);
  if (w->f->ids) {
    unpack(d->embedding, (int)w->f->ids[row], x);
    if (d->embedding_scale != 1)
      for (int i = 0; i < width; ++i) x[i] *= d->embedding_scale;
    if (d->positions) {
      float *at = read;  // not in use yet
      unpack(d->positions, (int)(w->f->positions[row] + w->f->shift), at);
      for (int i = 0; i < width; ++i) x[i] += at[i];
    }
  } else {
    memcpy(x, inputs, (size_t)width * 4);
  }
  if (!d->has_states) return;
  const float *state = w->f->ids ? inputs : inputs + width;
  normalise(&d->embed_norm, x, width, read + (d->is_state_first ? width : 0));
  float *normed = read + (d->is_state_first ? 0 : width);
  normalise(&d->state_norm, state, width, normed);
  if (d->entrance) prepare_row(w, d->entrance, row, read);
  else memcpy(x, d->adds_to_normed ? normed : state, (size_t)width * 4);
}

// What a layer gave is added here if it has to be normed first.
static void add_normed(forward *w, const block *b, const norm *n, int row) {
  const int width = w->d->hidden;
  float *x = w->x + (size_t)row * width, *y = w->y + (size_t)row * width;
  if (!n->kind) return;
  normalise(n, y, width, y);
  for (int i = 0; i < width; i += LANES)
    store_some(x + i, fma16(all(b->residual_scale), load_some(y + i, width - i), load_some(x + i, width - i)), width - i);
}

// A block's result is complete, and kept if it is asked for.
static void leave_row(forward *w, int number, int row) {
  const int width = w->d->hidden;
  const block *b = w->d->blocks + number;
  const float *x = w->x + (size_t)row * width;
  add_normed(w, b, &b->down_norm, row);
  for (int i = 0; i < w->f->num_states; ++i)
    if (w->f->state_layers[i] == number)
      memcpy(w->f->states + ((size_t)i * w->f->rows + row) * width, x, (size_t)width * 4);
}

static void read_row(forward *w, const norm *n, const matrix *m, int row) {
  const int width = w->d->hidden;
  float *read = w->read + (size_t)row * 2 * width;
  normalise(n, w->x + (size_t)row * width, width, read);
  prepare_row(w, m, row, read);
}

static void place_row(forward *w, const block *b, int row) {
  const batch *f = w->f;
  const int width = b->width, q = b->heads * width, kv = b->kv_heads * width;
  const rope *t = b->rope < 0 ? NULL : w->d->ropes + b->rope;
  const int64_t position = f->positions[row] + f->shift;
  float *joined = w->joined + (size_t)row * outputs_of(&b->qkv), *queries = w->queries + (size_t)row * q;
  memcpy(queries, joined, (size_t)q * 4);
  float *keys = joined + q, *values = keys + kv;
  if (b->has_wide_norms) {
    normalise(&b->query_norm, queries, q, queries);
    normalise(&b->key_norm, keys, kv, keys);
  }
  for (int h = 0; h < b->heads + b->kv_heads; ++h) {
    const int is_key = h >= b->heads;
    float *x = is_key ? keys + (h - b->heads) * width : queries + h * width;
    if (!b->has_wide_norms) normalise(is_key ? &b->key_norm : &b->query_norm, x, width, x);
    if (t) rotate(t, position, x);
  }
  for (int h = 0; h < b->kv_heads; ++h) {
    const size_t at = (((size_t)f->slots[row] * b->kv_heads + h) * b->capacity + f->places[row]) * width;
    for (int i = 0; i < width; ++i)
      if (b->is_half) {
        ((uint16_t *)b->keys)[at + i] = narrow(keys[h * width + i]);
        ((uint16_t *)b->values)[at + i] = narrow(values[h * width + i]);
      } else {
        ((float *)b->keys)[at + i] = keys[h * width + i];
        ((float *)b->values)[at + i] = values[h * width + i];
      }
  }
}

static void attended_row(forward *w, const attention *a, int row) {
  const block *b = a->b;
  const int width = b->heads * b->width;
  collect(a, row);
  float *x = w->attended + (size_t)row * width;
  if (b->has_gates) {
    const float *gates = w->joined + (size_t)(row + 1) * outputs_of(&b->qkv) - width;
    for (int i = 0; i < width; i += LANES)
      store_some(x + i, mul(load_some(x + i, width - i), sigmoid(load_some(gates + i, width - i))), width - i);
  }
  prepare_row(w, b->out.parts[0], row, x);
}

static void run_net(forward *w, const block *b, const net_batch *p) {
  const delta *net = b->net;
  const batch *f = w->f;
  const int outputs = outputs_of(&b->qkv), channels = net->c.channels, heads = net->r.heads, wide = heads * net->r.columns;
  const int keys = net->r.key_heads * net->r.width;
  FOR_ROWS(row, f->rows) {
    const float *joined = w->joined + (size_t)row * outputs, *betas = joined + channels + wide, *steps = betas + heads;
    memcpy(p->fed + (size_t)row * channels, joined, (size_t)channels * 4);
    for (int h = 0; h < heads; h += LANES) {
      const lanes step = softplus(add(load_some(steps + h, heads - h), load_some(net->shifts + h, heads - h)));
      store_some(p->logs + (size_t)row * heads + h, mul(load_some(net->rates + h, heads - h), step), heads - h);
      store_some(p->betas + (size_t)row * heads + h, sigmoid(load_some(betas + h, heads - h)), heads - h);
    }
  }
  conv_text texts[f->num_texts];
  rule_input steps[f->num_texts];
  for (int t = 0, row = 0; t < f->num_texts; row += f->text_rows[t++]) {
    float *mixed = p->mixed + (size_t)row * channels;
    texts[t] = (conv_text){f->text_rows[t], (size_t)outputs, (size_t)channels, w->joined + (size_t)row * outputs, p->tails[t],
                         p->new_tails[t], mixed};
    steps[t] = (rule_input){f->text_rows[t], (size_t)channels, (size_t)channels, (size_t)heads, mixed + keys, mixed, mixed + 2 * keys,
                       p->logs + (size_t)row * heads, p->betas + (size_t)row * heads, p->states[t], p->new_states[t],
                       w->attended + (size_t)row * wide};
  }
  meet();
  convolve(&net->c, texts, f->num_texts);
  meet();
  step_texts(&net->r, steps, f->num_texts, w->rule_room);
  meet();
  FOR_ROWS(row, f->rows) {
    float *x = w->attended + (size_t)row * wide;
    const float *z = w->joined + (size_t)row * outputs + channels;
    for (int h = 0; h < heads; ++h) normalise(&net->norm, x + h * net->r.columns, net->r.columns, x + h * net->r.columns);
    for (int i = 0; i < wide; i += LANES)
      store_some(x + i, mul(load_some(x + i, wide - i), activated(SILU, load_some(z + i, wide - i))), wide - i);
    prepare_row(w, b->out.parts[0], row, x);
  }
  meet();
}

static void activate(forward *w, const block *b) {
  const matrix *m = b->down.parts[0];
  const int width = m->inputs, parts = (width + SOME - 1) / SOME;
  for (int unit; take(w->f->rows * parts, 1, &unit) > 0;) {
    const int row = unit / parts, begin = unit % parts * SOME, end = begin + SOME < width ? begin + SOME : width;
    float *x = w->inner + (size_t)row * outputs_of(&b->up);
    for (int i = begin; i < end; i += LANES) {
      lanes y = activated(b->activation, load_some(x + i, end - i));
      if (b->is_gated) y = mul(y, load_some(x + width + i, end - i));
      store_some(x + i, y, end - i);
    }
    prepare_some(m->form, width, begin, end, x, w->prepared + (size_t)row * prepared_bytes(m->form, width));
  }
}

// A layer's outputs: to what blocks add to, or to y where they are to be normed first.
static void add_layer(forward *w, const block *b, const layer *l, const norm *n) {
  if (n->kind) multiply(l, w->f->rows, w->prepared, w->y, NULL, 1);
  else multiply(l, w->f->rows, w->prepared, w->x, w->x, b->residual_scale);
}

static void run_attention(forward *w, const block *b) {
  FOR_ROWS(row, w->f->rows) place_row(w, b, row);
  meet();
  attention a = {b, w->f, w->groups, w->num_groups, w->queries, w->attended, NULL, w->rooms};
  if (num_partials(&a, w->threads)) a.partials = w->partials;
  attend(&a);
  meet();
  FOR_ROWS(row, w->f->rows) attended_row(w, &a, row);
  meet();
}

static void run_block(forward *w, int number) {
  const decoder *d = w->d;
  const block *b = d->blocks + number;
  const int rows = w->f->rows, only_keys = w->f->only_keys, is_read = number == 0 && d->has_states && !d->entrance;
  FOR_ROWS(row, rows) {
    if (number && !only_keys) leave_row(w, number - 1, row);
    if (only_keys) prepare_row(w, b->qkv.parts[0], row, w->x + (size_t)row * d->hidden);
    else if (is_read) prepare_row(w, b->qkv.parts[0], row, w->read + (size_t)row * 2 * d->hidden);
    else read_row(w, &b->input_norm, b->qkv.parts[0], row);
  }
  meet();
  multiply(&b->qkv, rows, w->prepared, w->joined, NULL, 1);
  meet();
  if (only_keys) {  // the input states become keys and values, and nothing else
    FOR_ROWS(row, rows) place_row(w, b, row);
    meet();
    return;
  }
  if (b->net) {
    int before = 0;
    for (int i = 0; i < number; ++i) before += d->blocks[i].net != NULL;
    run_net(w, b, w->f->net_batches + before);
  } else run_attention(w, b);
  add_layer(w, b, &b->out, &b->out_norm);
  meet();
  FOR_ROWS(row, rows) {
    add_normed(w, b, &b->out_norm, row);
    read_row(w, &b->mlp_norm, b->up.parts[0], row);
  }
  meet();
  multiply(&b->up, rows, w->prepared, w->inner, NULL, 1);
  meet();
  activate(w, b);
  meet();
  add_layer(w, b, &b->down, &b->down_norm);
  meet();
}

static void run(void *task) {
  forward *w = task;
  const decoder *d = w->d;
  const batch *f = w->f;
  const int width = d->hidden, rows = f->rows;
  FOR_ROWS(row, rows) enter_row(w, row);
  meet();
  if (d->entrance) {
    multiply(&(layer){1, {d->entrance}}, rows, w->prepared, w->x, NULL, 1);
    meet();
  }
  for (int i = 0; i < d->num_blocks; ++i) run_block(w, i);
  if (f->only_keys) return;
  FOR_ROWS(row, rows) {
    leave_row(w, d->num_blocks - 1, row);
    float *read = w->read + (size_t)row * 2 * width;
    normalise(&d->last_norm, w->x + (size_t)row * width, width, read);
    normalise(&d->second_norm, read, width, read);
    for (int i = 0; i < f->num_states; ++i)
      if (f->state_layers[i] == -1) memcpy(f->states + ((size_t)i * rows + row) * width, read, (size_t)width * 4);
  }
  if (!f->num_wanted) return;
  meet();
  const layer ends = {d->rarer ? 2 : 1, {d->output, d->rarer}};
  const int words = outputs_of(&ends);
  FOR_ROWS(i, f->num_wanted) prepare_row(w, d->output, i, w->read + (size_t)f->wanted[i] * 2 * width);
  meet();
  multiply(&ends, f->num_wanted, w->prepared, f->logits, NULL, d->logit_scale);
  if (d->logit_softcap == 0) return;
  meet();
  const lanes cap = all(d->logit_softcap);
  FOR_ROWS(i, f->num_wanted)
    for (int k = 0; k < words; k += LANES) {
      float *x = f->logits + (size_t)i * words + k;
      store_some(x, mul(tanh16(over(load_some(x, words - k), cap)), cap), words - k);
    }
}

// ---------------------------------------------------------------------------------------- memory

static size_t most(size_t a, size_t b) { return a > b ? a : b; }
// The next part of a memory, which begins at a line of the cache. Without a memory it is counted only.
static void *part_of(uint8_t *memory, size_t *used, size_t bytes) {
  void *part = memory ? memory + *used : NULL;
  *used += (bytes + 63) / 64 * 64;
  return part;
}

typedef struct {  // floats of a row, but for `prepared`, which are bytes; then floats of all rows, and of a thread
  size_t joined, queries, inner, prepared, partials, rules, room;
} sizes;

static sizes sizes_of(const forward *w) {
  const decoder *d = w->d;
  sizes s = {0};
  for (const block *b = d->blocks; b < d->blocks + d->num_blocks; ++b) {
    const layer *layers[] = {&b->qkv, &b->out, &b->up, &b->down};
    for (int k = 0; k < 4; ++k) s.prepared = most(s.prepared, prepared_bytes(layers[k]->parts[0]->form, layers[k]->parts[0]->inputs));
    s.joined = most(s.joined, (size_t)outputs_of(&b->qkv));
    s.inner = most(s.inner, (size_t)outputs_of(&b->up));
    if (b->net) {
      s.queries = most(s.queries, (size_t)b->net->r.heads * b->net->r.columns);
      s.rules = most(s.rules, room_of(&b->net->r, (size_t)w->f->rows));
    } else {
      const attention a = {.b = b, .f = w->f, .groups = w->groups, .num_groups = w->num_groups};
      s.queries = most(s.queries, (size_t)b->heads * b->width);
      s.room = most(s.room, room_floats(b));
      s.partials = most(s.partials, num_partials(&a, w->threads));
    }
  }
  if (d->entrance) s.prepared = most(s.prepared, prepared_bytes(d->entrance->form, d->entrance->inputs));
  if (w->f->num_wanted) s.prepared = most(s.prepared, prepared_bytes(d->output->form, d->output->inputs));
  return s;
}

// Say where each buffer lies in a memory, and return how many bytes they take.
static size_t lay_out(forward *w, const sizes *s, uint8_t *memory) {
  const size_t rows = (size_t)w->f->rows, width = (size_t)w->d->hidden;
  size_t used = 0;
  w->x = part_of(memory, &used, rows * width * 4);
  w->y = part_of(memory, &used, rows * width * 4);
  w->read = part_of(memory, &used, rows * width * 8);
  w->joined = part_of(memory, &used, rows * s->joined * 4);
  w->queries = part_of(memory, &used, rows * s->queries * 4);
  w->attended = part_of(memory, &used, rows * s->queries * 4);
  w->inner = part_of(memory, &used, rows * s->inner * 4);
  w->rule_room = part_of(memory, &used, s->rules * 4);
  w->partials = part_of(memory, &used, s->partials * 4);
  w->rooms = part_of(memory, &used, (size_t)w->threads * s->room * 4);
  w->prepared = part_of(memory, &used, rows * s->prepared);
  return used;
}

static int is_below(const int64_t *numbers, int count, int64_t first, int64_t end) {
  for (int i = 0; numbers && i < count; ++i)
    if (numbers[i] < first || numbers[i] >= end) return 0;
  return 1;
}

// Whether all that a batch names is there: nothing outside a buffer is read or written.
static int is_inside(const decoder *d, const batch *f) {
  if (!is_below(f->wanted, f->num_wanted, 0, f->rows)) return 0;
  if (f->ids && !is_below(f->ids, f->rows, 0, d->embedding->outputs)) return 0;
  for (const block *b = d->blocks; b < d->blocks + d->num_blocks; ++b) {
    if (b->net && (b->net->c.taps > MOST_TAPS || b->net->r.width > WIDEST_KEY)) return 0;
    if (b->net) continue;
    const int has_all = is_below(f->slots, f->rows, 0, b->slots) && is_below(f->places, f->rows, 0, b->capacity);
    if (!has_all || !is_below(f->positions, f->rows, 0, b->capacity)) return 0;
    if (b->looks_ahead && !(f->ends && is_below(f->ends, f->rows, 1, b->capacity + 1))) return 0;
    if (f->depth && !is_below(f->line, f->rows * f->depth, INT64_MIN, b->capacity)) return 0;
  }
  return 1;
}

// Run a batch.
int run_decoder(const decoder *d, const batch *f, int threads) {
  if (!is_inside(d, f)) return NO_PLACE;
  forward w = {.d = d, .f = f, .threads = threads};
  w.groups = malloc((size_t)f->rows * sizeof *w.groups);
  if (!w.groups) return NO_MEMORY;
  w.num_groups = make_groups(f, w.groups);
  const sizes s = sizes_of(&w);
  uint8_t *memory = NULL;
  if (!posix_memalign((void **)&memory, 64, lay_out(&w, &s, NULL) + 64)) {
    lay_out(&w, &s, memory);
    run_in_threads(threads, run, &w);
  }
  free(memory);
  free(w.groups);
  return memory ? 0 : NO_MEMORY;
}
