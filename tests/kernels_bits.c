// Random decoders and batches, convolutions and rules, rows of GGUF's types in panels, and choices, all by the kernels:
// prints a hash of all bits for each seed. Built for several CPUs, whose hashes have to be equal, and with sanitizers.
// `kernels_bits FIRST COUNT THREADS [all]`; `kernels_bits jobs 0 THREADS` does many small jobs.

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "../runtime/kernels/c/decoder.h"
#include "../runtime/kernels/c/sampling.h"
#include "../runtime/kernels/c/threads.h"

int apply_linear(const layer *, int, const float *, float *, int);
int apply_convolution(const convolution *, const conv_text *, int, int);
int apply_rule(const rule *, const rule_input *, int, int);
void tabulate(float *, float *, int, int, const double *, double);
int64_t survivors(const choice *, const float *, int, double *, int64_t *);
int64_t leaders(const choice *, const float *, int, int, double *, int64_t *, double *);

static uint32_t state;
static uint32_t next(uint32_t below) {
  state = state * 1664525 + 1013904223;
  return (state >> 8) % below;
}
static float number(void) { return ((int)next(2001) - 1000) / 1000.0f; }
static float *numbers(int count, float scale) {
  float *x = malloc((size_t)count * 4);
  for (int i = 0; i < count; ++i) x[i] = number() * scale;
  return x;
}

static void put_halves(uint8_t *to, int count, int has_signs) {  // float16 from 2^-11 to 2^-9 or so
  for (int i = 0; i < count; ++i) to[2 * i + 1] = 0x10 + next(8) + (has_signs && next(2) ? 128 : 0);
}

static matrix new_matrix(int form, int outputs, int inputs) {
  const layout l = layouts[form];
  const size_t size = bytes_of(form, outputs, inputs);
  uint8_t *data = malloc(size);
  if (form == FLOAT)
    for (size_t i = 0; i < size / 4; ++i) ((float *)data)[i] = number() / 8;
  else if (form == HALF)
    for (size_t i = 0; i < size / 2; ++i) ((uint16_t *)data)[i] = narrow(number() / 8);
  else
    for (size_t i = 0; i < size; ++i) data[i] = next(256);
  if (form == FLOAT16) put_halves(data, (int)(size / 2), 1);
  if (form >= Q8)
    for (uint8_t *panel = data; panel < data + size; panel += panel_bytes(form, inputs)) {
      uint8_t *step = panel;
      for (int b = 0; b < num_blocks(inputs); ++b, step += step_bytes(form)) {
        if (l.shared && b % 8 == 0) put_halves(step, l.shared / 2, 1), step += l.shared;
        if (!l.shared) put_halves(step + l.numbers + l.plane, l.scales / 2, form == Q4M || form == Q5M);
      }
    }
  return (matrix){form, outputs, inputs, data, next(2) ? numbers(outputs, 0.1f) : NULL};
}
static layer new_layer(int form, int outputs, int inputs) {
  matrix *m = malloc(sizeof *m);
  *m = new_matrix(form, outputs, inputs);
  return (layer){1, {m}};
}
static norm new_norm(int is_there, int width) {
  const int kind = is_there ? 1 + next(2) : NO_NORM;
  return (norm){kind, 1e-5f, kind ? numbers(width, 1) : NULL, kind == LAYER_NORM ? numbers(width, 0.1f) : NULL};
}

// In the place of attention; qkv makes queries, keys, values, z, b and a.
static delta *new_net(block *b, int hidden, int form, int out_form) {
  const int key_heads = 1 + next(2), heads = key_heads * (1 + next(2)), keys = 1 + next(70), columns = 1 + next(80);
  const int channels = 2 * key_heads * keys + heads * columns, taps = 2 + next(3);
  delta *n = malloc(sizeof *n);
  float *weight = numbers(taps * channels, 1), *bias = next(2) ? numbers(channels, 1) : NULL;
  float *shifts = numbers(heads, 4), *rates = numbers(heads, 1);
  for (int h = 0; h < heads; ++h) rates[h] = -rates[h] * rates[h];
  *n = (delta){{channels, taps, 1, weight, bias}, {heads, key_heads, keys, columns, 1, 1, 0.3f},
               {RMS_NORM, 1e-5f, numbers(columns, 1), NULL}, rates, shifts};
  b->qkv = new_layer(form, channels + heads * columns + 2 * heads, hidden);
  b->out = new_layer(out_form, hidden, heads * columns);
  return n;
}

// What a net reads for some texts: what it left behind the last rows of each is read next.
static net_batch new_net_batch(const delta *n, int texts, int rows, float **tails, float **states) {
  const size_t tail = (size_t)(n->c.taps - 1) * n->c.channels, held = (size_t)n->r.heads * n->r.width * n->r.columns;
  for (int t = 0; t < texts; ++t)
    if (!tails[t]) tails[t] = calloc(tail, 4), states[t] = calloc(held, 4);
  return (net_batch){(const float *const *)tails, (const float *const *)states, tails, states,
                   malloc((size_t)rows * n->c.channels * 4), malloc((size_t)rows * n->c.channels * 4),
                   malloc((size_t)rows * n->r.heads * 4), malloc((size_t)rows * n->r.heads * 4)};
}

static uint32_t hash_of(const void *data, size_t bytes, uint32_t hash) {
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ ((const uint8_t *)data)[i]) * 16777619u;
  return hash;
}

// A matrix's rows in two pieces, of any bytes: the hash of its panels and of the numbers that they hold.
static uint32_t repacked(int form, uint32_t hash) {
  const int per = layouts[form].file_inputs, bytes = layouts[form].file_bytes, outputs = 1 + next(50), blocks = 1 + next(per > 1 ? 3 : 80);
  const int inputs = per * blocks - (form == Q8 ? (int)next(32) : 0), begins[] = {0, LANES * next((outputs + 15) / 16), outputs};
  uint8_t *panels = malloc(bytes_of(form, outputs, inputs));
  const matrix m = {form, outputs, inputs, panels, NULL};
  float *row_numbers = malloc((size_t)inputs * 4);
  for (int piece = 0; piece < 2; ++piece) {
    const int first = begins[piece], rows = begins[piece + 1] - first;
    uint8_t *data = malloc((size_t)rows * blocks * bytes);
    for (int i = 0; i < rows * blocks * bytes; ++i) data[i] = next(256);
    repack(form, data, first, rows, inputs, panels);
  }
  for (int row = 0; row < outputs; ++row) {
    unpack(&m, row, row_numbers);
    for (int k = 0; k < inputs; ++k) row_numbers[k] = isnan(row_numbers[k]) ? 0 : row_numbers[k];
    hash = hash_of(row_numbers, (size_t)inputs * 4, hash);
  }
  return hash_of(panels, bytes_of(form, outputs, inputs), hash);
}

// Panels of a matrix whose weights are rounded to four bits, and some of its rows.
static uint32_t rounded(int form, uint32_t hash) {
  const int outputs = 1 + (int)next(40), inputs = 1 + (int)next(300);  // one after the other, on every CPU
  const matrix m = new_matrix(form, outputs, inputs);
  const int64_t row = next((uint32_t)m.outputs);
  matrix one = m;
  float *numbers_of_it = malloc((size_t)m.inputs * 4);
  one.panels = calloc(1, panel_bytes(form, m.inputs));
  gather(&m, 1, &row, (uint8_t *)one.panels);
  unpack(&one, 0, numbers_of_it);
  hash = hash_of(numbers_of_it, (size_t)m.inputs * 4, hash);
  const size_t bytes = panel_bytes(Q4, m.inputs);
  uint8_t *panel = malloc(bytes);
  for (int i = 0; i < (m.outputs + LANES - 1) / LANES; ++i) {
    const int fits = round_panel(&m, i, panel);
    hash = hash_of(panel, bytes, hash ^ (uint32_t)fits);
  }
  return hash;
}

// Products of the largest numbers with the largest inputs of either sign, whose sums need the most bits.
static uint32_t farthest(int form, int threads, uint32_t hash) {
  enum { INPUTS = 256, ROWS_OF = 8 };
  const layer l = new_layer(form, LANES, INPUTS);
  const layout parts = layouts[form];
  uint8_t *step = (uint8_t *)l.parts[0]->panels;
  float x[ROWS_OF * INPUTS], y[ROWS_OF * LANES];
  for (int b = 0; b < num_blocks(INPUTS); ++b, step += step_bytes(form)) {
    if (b % 8 == 0) step += parts.shared;
    memset(step, form == Q8 ? 0 : 255, (size_t)(parts.numbers + parts.plane));  // 0 is -128
  }
  for (int i = 0; i < ROWS_OF * INPUTS; ++i) x[i] = i / INPUTS % 3 == 0 ? 1 : i / INPUTS % 3 == 1 ? -1 : i % 3 - 1;
  if (apply_linear(&l, ROWS_OF, x, y, threads)) exit(1);
  return hash_of(y, sizeof y, hash);
}

// Of two texts, one of which goes on where its state is written.
static uint32_t stepped(int threads, uint32_t hash) {
  const int channels = 1 + next(130), taps = 1 + next(5), corrects = next(2), rows = next(8);
  const int key_heads = 1 + next(3), heads = key_heads * (1 + next(2)), width = 1 + next(130), columns = 1 + next(130);
  const int keys = key_heads * width, values = heads * columns, tail = (taps - 1) * channels, held = heads * width * columns;
  const convolution c = {channels, taps, next(2), numbers(taps * channels, 1), next(2) ? numbers(channels, 1) : NULL};
  const rule r = {heads, key_heads, width, columns, corrects, corrects, 0.5f};
  conv_text texts[2];
  rule_input steps[2];
  for (int t = 0; t < 2; ++t) {
    float *before = numbers(tail, 2), *state = numbers(held, 1), *logs = numbers(rows * heads, 3);
    for (int i = 0; i < rows * heads; ++i) logs[i] = -fabsf(logs[i]);
    texts[t] = (conv_text){rows, channels, channels, numbers(rows * channels, 2), t ? before : NULL, before, numbers(rows * channels, 1)};
    steps[t] = (rule_input){rows, keys, values, heads, numbers(rows * keys, 1), numbers(rows * keys, 1), numbers(rows * values, 1),
                       logs, numbers(rows * heads, 1), t ? state : NULL, state, numbers(rows * values, 1)};
  }
  if (apply_convolution(&c, texts, 2, threads) || apply_rule(&r, steps, 2, threads)) exit(1);
  for (int t = 0; t < 2; ++t) {
    hash = hash_of(texts[t].after, (size_t)tail * 4, hash_of(texts[t].y, (size_t)rows * channels * 4, hash));
    hash = hash_of(steps[t].after, (size_t)held * 4, hash_of(steps[t].out, (size_t)rows * values * 4, hash));
  }
  return hash;
}

// What is chosen from flat and peaked rows with many ties.
static uint32_t chosen(int vocab, uint32_t hash) {
  double *weights = malloc((size_t)vocab * 8);
  int64_t *ids = malloc((size_t)vocab * 8);
  for (float spread = 4; spread < 100; spread *= 4) {
    float *x = numbers(vocab, spread);
    for (int way = 0; way < 24; ++way) {
      const choice how = {way % 4 ? 0.4 * (way % 4) : 0, way % 3 ? 0.45 * (way % 3) : 1, way % 5 ? 0 : 0.1, way, way % 2 ? 30 : 0};
      choice warm = how;
      warm.temperature += 0.2;
      const int64_t token = choose(&how, x, vocab, way), count = survivors(&warm, x, vocab, weights, ids);
      double also[2] = {confidence(x, vocab, vocab / 2)};
      hash = hash_of(ids, (size_t)count * 8, hash_of(weights, (size_t)count * 8, hash_of(&token, 8, hash)));
      const int64_t first = leaders(&warm, x, vocab, vocab < 9 ? vocab : 9, weights, ids, also + 1);
      hash = hash_of(ids, (size_t)first * 8, hash_of(also, sizeof also, hash));
    }
    free(x);
  }
  free(weights), free(ids);
  return hash;
}

static int times_done[64];
static void do_once(void *unused) {
  for (int unit; take(64, 1, &unit) > 0;) ++times_done[unit];
  meet();
}
static void do_nothing(void *unused) {
  for (int unit; take(8, 1, &unit) > 0;) {}
}
// Whether a job of one thread, right behind one of several, has a unit that is not done once: one of the several may
// come out of their last meeting late.
static int is_disturbed(int threads) {
  for (int job = 0; job < 3000000; ++job) {
    run_in_threads(threads, do_nothing, NULL);
    memset(times_done, 0, sizeof times_done);
    run_in_threads(1, do_once, NULL);
    for (int unit = 0; unit < 64; ++unit)
      if (times_done[unit] != 1) return 1;
  }
  return 0;
}

int main(int count, char **arguments) {
  static const int sizes[] = {1, 3, 17, 64, 65, 257, 1000, 4097, 30011};
  const int first = count > 1 ? atoi(arguments[1]) : 0, seeds = count > 2 ? atoi(arguments[2]) : 8, threads = count > 3 ? atoi(arguments[3]) : 2;
  const uint32_t num_forms = count > 4 ? 11 : 10;
  if (count > 1 && !strcmp(arguments[1], "jobs")) return puts(is_disturbed(threads) ? "disturbed" : "undisturbed") < 0;
  for (int seed = first; seed < first + seeds; ++seed) {
    state = (uint32_t)seed * 7919 + 1;
    // The CPU's own product of bfloat16 is the one thing that differs: only `all` forms are that one, too.
    const int forms[] = {FLOAT, FLOAT16, Q8, Q4, Q4M, Q5, Q5M, Q4K, Q5K, Q6K, HALF}, hidden = 8 + next(120), words = 20 + next(90), slots = 1 + next(3), capacity = 600;
    decoder d = {.hidden = hidden, .num_blocks = 1 + next(3), .embedding_scale = next(2) ? 1 : 3, .logit_scale = 0.5f,
                 .logit_softcap = next(2) ? 5 : 0};
    matrix embedding = new_matrix(forms[next(num_forms)], words, hidden), positions = new_matrix(FLOAT, capacity, hidden);
    d.embedding = d.output = &embedding;
    if (next(3) == 0) d.positions = &positions;
    d.last_norm = new_norm(1, hidden), d.second_norm = new_norm(next(4) == 0, hidden);
    const int has_nets = seed % 3 == 0;
    float *tails[3][3] = {{NULL}}, *left[3][3] = {{NULL}};  // of blocks and slots
    rope ropes[1];
    d.ropes = ropes;
    block *blocks = calloc((size_t)d.num_blocks, sizeof *blocks);
    d.blocks = blocks;
    const int width = 2 * (1 + next(40)), kv_heads = 1 + next(3), groups = 1 + next(4), turned = next(2) ? width : 2 * (1 + next(width / 2));
    float *cosines = numbers(capacity * turned / 2, 1), *sines = numbers(capacity * turned / 2, 1);
    double frequencies[40];
    for (int j = 0; j < turned / 2; ++j) frequencies[j] = 1 / (1.0 + next(1000));
    tabulate(cosines, sines, capacity, turned / 2, frequencies, 1);
    ropes[0] = (rope){turned, cosines, sines};
    for (int i = 0; i < d.num_blocks; ++i) {
      block *b = blocks + i;
      const int q = kv_heads * groups * width, kv = kv_heads * width, inner = 8 + next(150);
      b->heads = kv_heads * groups, b->kv_heads = kv_heads, b->width = b->value_width = width, b->rope = next(4) ? 0 : -1;
      b->window = next(2) ? 1 + next(400) : 0, b->has_wide_norms = next(2), b->has_gates = next(3) == 0;
      b->activation = next(6), b->is_gated = next(2), b->is_half = next(2);
      b->scaling = 0.2f, b->softcap = next(2) ? 10 : 0, b->residual_scale = next(2) ? 1 : 0.3f, b->sinks = next(2) ? numbers(b->heads, 4) : NULL;
      b->input_norm = new_norm(next(4), hidden), b->out_norm = new_norm(next(2), hidden);
      b->mlp_norm = new_norm(next(4), hidden), b->down_norm = new_norm(next(2), hidden);
      const int has_norms = next(2);
      b->query_norm = new_norm(has_norms, b->has_wide_norms ? q : width), b->key_norm = new_norm(has_norms, b->has_wide_norms ? kv : width);
      b->qkv = new_layer(forms[next(num_forms)], q + 2 * kv + (b->has_gates ? q : 0), hidden);
      b->out = new_layer(forms[next(num_forms)], hidden, q);
      b->up = new_layer(forms[next(num_forms)], inner * (1 + b->is_gated), hidden);
      b->down = new_layer(forms[next(num_forms)], hidden, inner);
      if (has_nets && next(3)) {
        const int form = forms[next(num_forms)], out_form = forms[next(num_forms)];
        b->net = new_net(b, hidden, form, out_form);
      }
      const size_t bytes = (size_t)slots * kv_heads * capacity * width * (b->is_half ? 2 : 4);
      b->slots = slots, b->capacity = capacity, b->keys = malloc(bytes), b->values = malloc(bytes);
      memset(b->keys, 0xff, bytes), memset(b->values, 0xff, bytes);  // numbers that are none: nobody may read them
    }
    uint32_t hash = 2166136261u;
    for (int form = 0; form < NUM_FORMS; ++form) hash = repacked(form, hash);
    for (int form = 0; form < NUM_FORMS; ++form) hash = rounded(form, hash);
    for (int form = Q8; form < NUM_FORMS; ++form) hash = farthest(form, threads, hash);
    for (int i = 0; i < 3; ++i) hash = stepped(threads, hash);
    hash = chosen(sizes[seed % 9], hash);
    int held[3] = {0};
    for (int step = 0; step < 5; ++step) {  // prompts, then a few tokens each, one of them with a branch
      int64_t ids[900], slot[900], position[900], place[900], line[900 * 2], wanted[900];
      int32_t text_rows[3];
      int rows = 0;
      for (int s = 0; s < slots; ++s) {
        const int fed = text_rows[s] = step ? 2 + next(6) : 1 + next(300);
        for (int i = 0; i < fed; ++i, ++rows) {
          const int is_branch = step == 2 && !has_nets && i == fed - 1;  // it follows the token before the last one
          ids[rows] = next((uint32_t)words), slot[rows] = s, place[rows] = held[s] + i, position[rows] = held[s] + i - is_branch;
          wanted[rows] = rows;
          line[2 * rows] = position[rows] - 1, line[2 * rows + 1] = place[rows];
          if (position[rows] == 0) line[2 * rows] = 0;
        }
        held[s] += fed - (step == 2 && !has_nets);
      }
      const int32_t layers[] = {0, -1};
      batch f = {.rows = rows, .num_wanted = rows, .depth = step == 2 && !has_nets ? 2 : 0, .num_states = 2, .ids = ids, .slots = slot,
                 .positions = position, .places = place, .line = line, .wanted = wanted, .state_layers = layers};
      f.states = malloc((size_t)2 * rows * hidden * 4), f.logits = malloc((size_t)rows * words * 4);
      net_batch net_batches[3];
      f.num_texts = slots, f.text_rows = text_rows, f.net_batches = net_batches;
      int nets = 0;
      for (int i = 0; i < d.num_blocks; ++i)
        if (blocks[i].net) net_batches[nets++] = new_net_batch(blocks[i].net, slots, rows, tails[i], left[i]);
      if (run_decoder(&d, &f, threads)) return 1;
      for (net_batch *p = net_batches; p < net_batches + nets; ++p) free(p->fed), free(p->mixed), free(p->logs), free(p->betas);
      for (int i = 0; i < rows * words; ++i)
        if (f.logits[i] != f.logits[i]) return printf("seed %d: a number that is none\n", seed), 1;
      hash = hash_of(f.states, (size_t)2 * rows * hidden * 4, hash_of(f.logits, (size_t)rows * words * 4, hash));
      free(f.states), free(f.logits);
    }
    printf("%d %08x\n", seed, hash);
  }
}
