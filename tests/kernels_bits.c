// Random decoders and batches, run by the kernels, and rows of GGUF's types in panels: prints a hash of all bits for each
// seed. Built for several CPUs, whose hashes have to be equal, and with sanitizers. `kernels_bits FIRST COUNT THREADS [all]`

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "../kernels/forward.h"

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
  return (matrix){form, outputs, inputs, data, next(2) ? numbers(outputs, 0.1f) : NULL, NULL};
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
  b->qkv = new_matrix(form, channels + heads * columns + 2 * heads, hidden);
  b->out = new_matrix(out_form, hidden, heads * columns);
  return n;
}

// What a net is given for some texts: what it left behind the last rows of each is read next.
static passing new_passing(const delta *n, int texts, int rows, float **tails, float **states) {
  const size_t tail = (size_t)(n->c.taps - 1) * n->c.channels, held = (size_t)n->r.heads * n->r.width * n->r.columns;
  for (int t = 0; t < texts; ++t)
    if (!tails[t]) tails[t] = calloc(tail, 4), states[t] = calloc(held, 4);
  return (passing){(const float *const *)tails, (const float *const *)states, tails, states,
                   malloc((size_t)rows * n->c.channels * 4), malloc((size_t)rows * n->c.channels * 4),
                   malloc((size_t)rows * n->r.heads * 4), malloc((size_t)rows * n->r.heads * 4)};
}

static uint32_t hash_of(const void *data, size_t bytes, uint32_t hash) {
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ ((const uint8_t *)data)[i]) * 16777619u;
  return hash;
}

// Inputs and bytes of a block of GGUF's, by form.
static const int kinds[][2] = {{1, 4}, {1, 2}, {1, 2}, {32, 34}, {32, 18}, {32, 20}, {32, 22}, {32, 24}, {256, 144}, {256, 176}, {256, 210}};

static float half_of(const uint8_t *at) {
  const int power = at[1] >> 2 & 31, rest = at[0] | (at[1] & 3) << 8;
  const float x = power == 31 ? (rest ? NAN : INFINITY) : ldexpf((float)(rest + (power ? 1024 : 0)), (power ? power : 1) - 25);
  return at[1] >> 7 ? -x : x;
}

// Number j of a block, as gguf unpacks it.
static float plain(int form, const uint8_t *block, int j) {
  const int has_minima = form == Q4M || form == Q5M, part = j / 32, i = j % 32;
  const uint8_t *q = block + (has_minima ? 4 : 2), *six = block + 4;
  uint32_t bits = 0; float x;
  if (form == FLOAT16) return half_of(block);
  if (form < Q8) return memcpy((uint8_t *)&bits + (form == HALF ? 2 : 0), block, kinds[form][1]), memcpy(&x, &bits, 4), x;
  if (form == Q8) return half_of(block) * (int8_t)q[j];
  if (form < Q4K) {
    if (form >= Q5) memcpy(&bits, q, 4), q += 4;
    const int n = (q[j % 16] >> 4 * (j / 16) & 15) | (bits >> j & 1) << 4;
    return has_minima ? half_of(block) * n + half_of(block + 2) : half_of(block) * (n - (form == Q4 ? 8 : 16));
  }
  if (form == Q6K) {
    const int low = block[64 * (j / 128) + j % 64] >> 4 * (j % 128 / 64) & 15, high = block[128 + 32 * (j / 128) + i] >> 2 * (part % 4) & 3;
    return half_of(block + 208) * (int8_t)block[192 + j / 16] * ((low | high << 4) - 32);
  }
  const int d = part < 4 ? six[part] & 63 : (six[part + 4] & 15) | six[part - 4] >> 6 << 4;
  const int m = part < 4 ? six[part + 4] & 63 : six[part + 4] >> 4 | six[part] >> 6 << 4;
  const int low = block[(form == Q5K ? 48 : 16) + 32 * (part / 2) + i] >> 4 * (part % 2) & 15, high = form == Q5K ? block[16 + i] >> part & 1 : 0;
  return half_of(block) * d * (low | high << 4) - half_of(block + 2) * m;
}

// A matrix's rows in two pieces, of any bytes and of scales that are odd: the hash of its panels, which must hold gguf's numbers.
static uint32_t repacked(int form, uint32_t hash) {
  static const uint16_t odd[] = {0, 0x8000, 1, 0x83ff, 0x7c00, 0xfc00, 0x7e00, 0xfdff, 0x7bff, 0x7f80};
  const int per = kinds[form][0], bytes = kinds[form][1], outputs = 1 + next(50), blocks = 1 + next(per > 1 ? 3 : 80);
  const int inputs = per * blocks - (form == Q8 ? (int)next(32) : 0), begins[] = {0, LANES * next((outputs + 15) / 16), outputs};
  uint8_t *panels = malloc(bytes_of(form, outputs, inputs));
  const matrix m = {form, outputs, inputs, panels, NULL, NULL};
  float *found = malloc((size_t)inputs * 4);
  for (int piece = 0; piece < 2; ++piece) {
    const int first = begins[piece], rows = begins[piece + 1] - first;
    uint8_t *data = malloc((size_t)rows * blocks * bytes);
    for (int i = 0; i < rows * blocks * bytes; ++i) data[i] = next(256);
    for (int i = 0; i < rows * blocks; ++i)
      if (next(2)) memcpy(data + i * bytes + (form == Q6K ? 208 : bytes > 2 ? 2 * next(2) : 0), odd + next(10), 2);
    repack(form, data, first, rows, inputs, panels);
    for (int row = 0; row < rows; ++row) {
      unpack(&m, first + row, found);
      for (int k = 0; k < inputs; ++k) {
        const float x = plain(form, data + (row * blocks + k / per) * bytes, k % per);
        if (memcmp(&x, found + k, 4) && !(isnan(x) && isnan(found[k]))) printf("form %d, row %d: %g, not %g\n", form, row, found[k], x), exit(1);
      }
    }
  }
  return hash_of(panels, bytes_of(form, outputs, inputs), hash);
}

int main(int count, char **given) {
  const int first = count > 1 ? atoi(given[1]) : 0, seeds = count > 2 ? atoi(given[2]) : 8, threads = count > 3 ? atoi(given[3]) : 2;
  const uint32_t num_forms = count > 4 ? 11 : 10;
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
    ropes[0] = (rope){turned, capacity, numbers(capacity * turned / 2, 1), numbers(capacity * turned / 2, 1)};
    for (int i = 0; i < d.num_blocks; ++i) {
      block *b = blocks + i;
      const int q = kv_heads * groups * width, kv = kv_heads * width, inner = 8 + next(150);
      b->heads = kv_heads * groups, b->kv_heads = kv_heads, b->width = b->value_width = width, b->rope = next(4) ? 0 : -1;
      b->window = next(2) ? 1 + next(400) : 0, b->has_wide_norms = next(2), b->has_gates = next(3) == 0;
      b->activation = next(6), b->is_gated = next(2), b->is_half = next(2);
      b->scaling = 0.2f, b->softcap = next(2) ? 10 : 0, b->residual_scale = next(2) ? 1 : 0.3f;
      b->input_norm = new_norm(next(4), hidden), b->out_norm = new_norm(next(2), hidden);
      b->mlp_norm = new_norm(next(4), hidden), b->down_norm = new_norm(next(2), hidden);
      const int has_norms = next(2);
      b->query_norm = new_norm(has_norms, b->has_wide_norms ? q : width), b->key_norm = new_norm(has_norms, b->has_wide_norms ? kv : width);
      b->qkv = new_matrix(forms[next(num_forms)], q + 2 * kv + (b->has_gates ? q : 0), hidden);
      b->out = new_matrix(forms[next(num_forms)], hidden, q);
      b->up = new_matrix(forms[next(num_forms)], inner * (1 + b->is_gated), hidden);
      b->down = new_matrix(forms[next(num_forms)], hidden, inner);
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
      passing passings[3];
      f.num_texts = slots, f.text_rows = text_rows, f.passings = passings;
      int nets = 0;
      for (int i = 0; i < d.num_blocks; ++i)
        if (blocks[i].net) passings[nets++] = new_passing(blocks[i].net, slots, rows, tails[i], left[i]);
      if (run_decoder(&d, &f, threads)) return 1;
      for (passing *p = passings; p < passings + nets; ++p) free(p->fed), free(p->mixed), free(p->logs), free(p->betas);
      for (int i = 0; i < rows * words; ++i)
        if (f.logits[i] != f.logits[i]) return printf("seed %d: a number that is none\n", seed), 1;
      hash = hash_of(f.states, (size_t)2 * rows * hidden * 4, hash_of(f.logits, (size_t)rows * words * 4, hash));
      free(f.states), free(f.logits);
    }
    printf("%d %08x\n", seed, hash);
  }
}
