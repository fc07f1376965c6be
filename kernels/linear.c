// Linear layers whose bits depend on a row alone: each output has one accumulator, and its inputs are
// added in rising order. In blocks of 32 inputs, products are integers, which are exact in any order;
// the blocks' sums are added in rising order. So neither the number of rows nor of threads nor the
// place of a row changes a bit. Tiles of several rows read a weight once for all.

#include "linear.h"

#include "threads.h"

#if VECTOR_BYTES == 64
enum { MOST_ROWS = 8, FEW_ROWS = 6, WIDTH = 4, NARROW = 3 };  // of a tile: rows; panels of few rows, of more
#else
enum { MOST_ROWS = 6, FEW_ROWS = 6, WIDTH = 1, NARROW = 1 };
#endif

static const int block_bytes[NUM_FORMS] = {64, 64, 512 + 32, 256 + 32, 256 + 32 + 32};
static const int block_inputs[NUM_FORMS] = {1, 2, 32, 32, 32};

INLINE int steps_of(int form, int inputs) { return (inputs + block_inputs[form] - 1) / block_inputs[form]; }
INLINE size_t panel_bytes(const matrix *m) { return (size_t)steps_of(m->form, m->inputs) * block_bytes[m->form]; }

// ------------------------------------------------------------------------------------ inputs
//
// Of blocks: q = round(x / s), and beside it s, where its sums of products begin (an offset of the
// weights, taken away in integers), and s times the sum of q.
typedef struct {
  int8_t q[32];
  float scale;
  int32_t start;
  float total;
  int32_t spare;  // of 48 bytes
} inputs_block;

INLINE int num_blocks(int inputs) { return (inputs + 31) / 32; }

size_t prepared_bytes(int form, int inputs) {
  size_t bytes = (size_t)inputs * 4;
  if (form == HALF) bytes = (size_t)(inputs + 1) / 2 * (HAS_BF16_DOT ? 4 : 8);
  if (form >= Q8) bytes = (size_t)num_blocks(inputs) * sizeof(inputs_block);
  return (bytes + 63) / 64 * 64;
}

static void quantise(const float *x, int count, int form, inputs_block *to) {
  lanes a = load_some(x, count), b = load_some(x + LANES, count < LANES ? 0 : count - LANES);
  float most = largest16(larger(size_of(a), size_of(b)));
  if (sum16(add(sub(a, a), sub(b, b))) != 0) most = NAN;  // one is no finite number
  ilanes whole[2] = {iall(0), iall(0)};
  to->scale = most != most ? most : 0;
  if (most >= 1e-30f) {  // smaller blocks are zeros: 127 / most would be none
    const float factor = 127 / most;
    const lanes magic = all(12582912.0f);  // 1.5 · 2^23: the sum has no room for a fraction
    to->scale = most / 127;
    whole[0] = float_bits(add(mul(a, all(factor)), magic));
    whole[1] = float_bits(add(mul(b, all(factor)), magic));
    whole[0] = iadd(whole[0], iall(-0x4b400000));
    whole[1] = iadd(whole[1], iall(-0x4b400000));
  }
  int32_t numbers[32], sum = 0;
  memcpy(numbers, whole, sizeof numbers);
  for (int i = 0; i < 32; ++i) to->q[i] = (int8_t)numbers[i];
  for (int i = 0; i < 32; ++i) sum += numbers[i];
  to->start = form == Q8 ? (SIGNED_WEIGHTS ? 0 : -128 * sum) : form == Q4 ? -8 * sum : 0;
  to->total = to->scale * (float)sum;
}

void prepare_some(int form, int inputs, int begin, int end, const float *x, void *prepared) {
  if (form == FLOAT || (form == HALF && !HAS_BF16_DOT)) {
    float *to = prepared;
    memcpy(to + begin, x + begin, (size_t)(end - begin) * 4);
    if (form == HALF && end == inputs && inputs % 2) to[inputs] = 0;
  } else if (form == HALF) {
    uint16_t *to = prepared;
    for (int i = begin; i < end; ++i) to[i] = narrow(x[i]);
    if (end == inputs && inputs % 2) to[inputs] = 0;
  } else {
    for (int b = begin / 32; b * 32 < end; ++b)
      quantise(x + b * 32, inputs - b * 32 < 32 ? inputs - b * 32 : 32, form, (inputs_block *)prepared + b);
  }
}

void prepare(int form, int inputs, const float *x, void *prepared) { prepare_some(form, inputs, 0, inputs, x, prepared); }

// ------------------------------------------------------------------------------------- tiles

typedef struct {  // where a tile's sums go
  const float *bias, *residual;
  float *y, scale;
  size_t step;
  int outputs;
} target;

static __attribute__((noinline)) void put(const float *sums, int rows, int panels, const target *to, int row, int output) {
  for (int r = 0; r < rows; ++r)
    for (int p = 0; p < panels; ++p, sums += LANES) {
      const int first = output + p * LANES, count = to->outputs - first;
      const size_t at = (size_t)(row + r) * to->step + first;
      lanes y = load(sums);
      if (to->bias) y = add(y, load_some(to->bias + first, count));
      if (to->residual) y = fma16(all(to->scale), y, load_some(to->residual + at, count));
      else y = mul(all(to->scale), y);
      store_some(to->y + at, y, count);
    }
}

#define ROWS _Pragma("GCC unroll 8") for (int r = 0; r < R; ++r)
#define PANELS _Pragma("GCC unroll 4") for (int p = 0; p < P; ++p)

INLINE void float_tile(const int R, const int P, const uint8_t *w, size_t panel, int inputs, const float *x,
                       size_t x_step, const target *to, int row, int output) {
  lanes sums[MOST_ROWS][WIDTH];
  ROWS PANELS sums[r][p] = all(0);
  for (int k = 0; k < inputs; ++k) {
    lanes weights[WIDTH];
    PANELS weights[p] = load((const float *)(w + p * panel) + (size_t)k * LANES);
    ROWS {
      lanes one = all(x[r * x_step + k]);
      PANELS sums[r][p] = fma16(one, weights[p], sums[r][p]);
    }
  }
  float found[MOST_ROWS * WIDTH * LANES];
  ROWS PANELS store(found + (r * P + p) * LANES, sums[r][p]);
  put(found, R, P, to, row, output);
}

INLINE void half_tile(const int R, const int P, const uint8_t *w, size_t panel, int inputs, const float *x,
                      size_t x_step, const target *to, int row, int output) {
  lanes sums[MOST_ROWS][WIDTH];
  ROWS PANELS sums[r][p] = all(0);
  for (int k = 0; k < (inputs + 1) / 2; ++k) {
    ilanes pairs[WIDTH];
    PANELS memcpy(&pairs[p], w + p * panel + (size_t)k * 64, 64);
#if HAS_BF16_DOT
    ROWS PANELS sums[r][p].v[0] = (vec)_mm512_dpbf16_ps((__m512)sums[r][p].v[0], (__m512bh)pairs[p].v[0],
                                                        (__m512bh)iall(four(x + r * x_step + k)).v[0]);
#else
    PANELS {
      lanes even, odd;
      EACH even.v[i] = (vec)(pairs[p].v[i] << 16), odd.v[i] = (vec)(pairs[p].v[i] & (int32_t)0xffff0000);
      ROWS sums[r][p] = fma16(all(x[r * x_step + 2 * k]), even, sums[r][p]);
      ROWS sums[r][p] = fma16(all(x[r * x_step + 2 * k + 1]), odd, sums[r][p]);
    }
#endif
  }
  float found[MOST_ROWS * WIDTH * LANES];
  ROWS PANELS store(found + (r * P + p) * LANES, sums[r][p]);
  put(found, R, P, to, row, output);
}

#if VECTOR_BYTES == 32 && !defined(__AVXVNNI__)
#define IN_16_BITS 1  // eight sums of four products of 15 · 127 fit, so pairs are added up last
#else
#define IN_16_BITS 0
#endif
// Whether a sum of products begins elsewhere than at 0, and is not put together last.
#define HAS_START(form) ((form) == Q8 ? !SIGNED_WEIGHTS : (form) == Q4 && !IN_16_BITS)
#define START(r) (four(x + (r) * x_step + offsetof(inputs_block, start)) - (ivec){0})

INLINE void block_tile(const int R, const int form, const uint8_t *w, int inputs, const uint8_t *x, size_t x_step,
                       const target *to, int row, int output) {
  const int numbers = form == Q8 ? 512 : 256;
  lanes sums[MOST_ROWS];
  ROWS sums[r] = all(0);
  for (int b = 0; b < num_blocks(inputs); ++b, w += block_bytes[form], x += sizeof(inputs_block)) {
    const lanes d = load_half(w + numbers), m = form == Q4M ? load_half(w + numbers + 32) : all(0);
    ilanes found[MOST_ROWS];
    EACH {
      ivec own[MOST_ROWS], others[2] = {{0}};  // two sums where rows are few: one would wait for itself
      ROWS own[r] = !HAS_START(form) ? (ivec){0} : START(r);
#pragma GCC unroll 8
      for (int j = 0; j < numbers / 64; ++j) {
        const uint8_t *from = w + 64 * j + VECTOR_BYTES * i;
        PREFETCH(from);
        ivec weights = load_bytes(from);
        if (form == Q8) {
#if SIGNED_WEIGHTS
          weights ^= (int32_t)0x80808080;
#endif
          ROWS {
            const ivec given = four(x + r * x_step + 4 * j) - (ivec){0};
            if (R <= 2 && j % 2) others[r & 1] = dot_bytes(others[r & 1], weights, given);
            else own[r] = dot_bytes(own[r], weights, given);
          }
        } else {
          const ivec low = weights & 0x0f0f0f0f, high = (weights >> 4) & 0x0f0f0f0f;
          ROWS {
            const ivec first = four(x + r * x_step + 8 * j) - (ivec){0}, second = four(x + r * x_step + 8 * j + 4) - (ivec){0};
#if IN_16_BITS
            own[r] = (ivec)_mm256_add_epi16((__m256i)own[r], _mm256_maddubs_epi16((__m256i)low, (__m256i)first));
            own[r] = (ivec)_mm256_add_epi16((__m256i)own[r], _mm256_maddubs_epi16((__m256i)high, (__m256i)second));
#else
            own[r] = dot_small(own[r], low, first);
            if (R <= 2) others[r & 1] = dot_small(others[r & 1], high, second);
            else own[r] = dot_small(own[r], high, second);
#endif
          }
        }
      }
#if IN_16_BITS
      if (form != Q8) ROWS own[r] = (ivec)_mm256_madd_epi16((__m256i)own[r], _mm256_set1_epi16(1)) + START(r);
#endif
      ROWS found[r].v[i] = R <= 2 ? own[r] + others[r & 1] : own[r];
    }
    ROWS {
      const inputs_block *block = (const inputs_block *)(x + r * x_step);
      sums[r] = fma16(as_floats(found[r]), mul(d, all(block->scale)), sums[r]);
      if (form == Q4M) sums[r] = fma16(m, all(block->total), sums[r]);
    }
  }
  float result[MOST_ROWS * LANES];
  ROWS store(result + r * LANES, sums[r]);
  put(result, R, 1, to, row, output);
}

// ---------------------------------------------------------------------------- all rows of some panels

#define CASE(r, call) case r: call(r); break;
#define SWITCH(rows, call) \
  switch (rows) { CASE(1, call) CASE(2, call) CASE(3, call) CASE(4, call) CASE(5, call) CASE(6, call) CASE(7, call) CASE(8, call) }

// How many of the rows that are left a tile takes: as many as the others, if there are to be more.
INLINE int rows_of_tile(int left, int most) { return left <= most ? left : left < 2 * most ? (left + 1) / 2 : most; }

static void float_panels(const matrix *m, int first, int count, int rows, const uint8_t *x, size_t x_step, const target *to) {
  const size_t panel = panel_bytes(m);
  const int width = rows > FEW_ROWS ? NARROW : WIDTH;
  for (int p = first, taken; p < first + count; p += taken) {
    const uint8_t *w = m->panels + p * panel;
    taken = first + count - p >= width ? width : 1;
    for (int row = 0, some; row < rows; row += some) {
      some = rows_of_tile(rows - row, MOST_ROWS);
      const float *from = (const float *)(x + row * x_step);
#define FLOATS(r) float_tile(r, P, w, panel, m->inputs, from, x_step / 4, to, row, p * LANES)
#define HALVES(r) half_tile(r, P, w, panel, m->inputs, from, x_step / 4, to, row, p * LANES)
#define TILE(width) { enum { P = width }; if (m->form == FLOAT) { SWITCH(some, FLOATS) } else { SWITCH(some, HALVES) } }
      if (taken == 1) TILE(1)
      else if (width == NARROW) TILE(NARROW)
      else TILE(WIDTH)
    }
  }
}

static void block_panels(const matrix *m, int first, int count, int rows, const uint8_t *x, size_t x_step, const target *to) {
  const size_t panel = panel_bytes(m);
  for (int p = first; p < first + count; ++p) {
    const uint8_t *w = m->panels + p * panel;
    for (int row = 0, some; row < rows; row += some) {
      some = rows_of_tile(rows - row, MOST_ROWS);
      const uint8_t *from = x + row * x_step;
#define BLOCKS(r) block_tile(r, F, w, m->inputs, from, x_step, to, row, p * LANES)
#define FORM(form) case form: { enum { F = form }; SWITCH(some, BLOCKS) } break;
      switch (m->form) { FORM(Q8) FORM(Q4) FORM(Q4M) }
    }
  }
}

void multiply(const matrix *m, int rows, const void *prepared, float *y, size_t y_step, const float *residual, float scale) {
  const int panels = (m->outputs + LANES - 1) / LANES, grain = m->form >= Q8 ? 1 : rows > FEW_ROWS ? NARROW : WIDTH;
  const target to = {m->bias, residual, y, scale, y_step, m->outputs};
  int begin, share = (fair_share(panels) + grain - 1) / grain * grain, count;
  while ((count = take(panels, share, &begin)) > 0)
    (m->form < Q8 ? float_panels : block_panels)(m, begin, count, rows, prepared, prepared_bytes(m->form, m->inputs), &to);
}

// ----------------------------------------------------------------------------- products of floats

INLINE void product_tile(const int R, const int P, const int is_half, const int is_whole, int count, int steps, const float *x,
                         size_t x_step, const uint8_t *w, size_t w_step, float *y, size_t y_step, int adds) {
  lanes sums[MOST_ROWS][WIDTH];
  ROWS PANELS sums[r][p] = !adds ? all(0) : load_some(y + r * y_step + p * LANES, is_whole ? LANES : count);
  for (int k = 0; k < steps; ++k, w += w_step) {
    lanes weights[WIDTH];
    if (is_whole && is_half) PANELS weights[p] = load_wide((const uint16_t *)w + p * LANES);
    else if (is_whole) PANELS weights[p] = load((const float *)w + p * LANES);
    else {
      float t[LANES] = {0};
      for (int i = 0; i < count; ++i) t[i] = is_half ? wide(((const uint16_t *)w)[i]) : ((const float *)w)[i];
      weights[0] = load(t);
    }
    ROWS {
      const lanes one = all(x[r * x_step + k]);
      PANELS sums[r][p] = fma16(one, weights[p], sums[r][p]);
    }
  }
  ROWS PANELS store_some(y + r * y_step + p * LANES, sums[r][p], is_whole ? LANES : count);
}

void multiply_floats(int rows, int columns, int steps, const float *x, size_t x_step, const void *w, size_t w_step,
                     int is_half, float *y, size_t y_step, int adds) {
  const size_t bytes = is_half ? 2 : 4;
  for (int first = 0, taken; first < columns; first += taken) {
    const int left = columns - first;
    taken = left >= WIDTH * LANES ? WIDTH * LANES : left < LANES ? left : LANES;
    for (int row = 0, some; row < rows; row += some) {
      some = rows_of_tile(rows - row, FEW_ROWS);
      const uint8_t *from = (const uint8_t *)w + first * bytes;
#define PRODUCTS(r) product_tile(r, P, H, W, taken, steps, x + row * x_step, x_step, from, w_step * bytes, y + row * y_step + first, y_step, adds)
#define PRODUCT(panels, is_whole) { enum { P = panels, W = is_whole }; if (is_half) { enum { H = 1 }; FEW(some, PRODUCTS) } else { enum { H = 0 }; FEW(some, PRODUCTS) } }
#define FEW(rows, call) switch (rows) { CASE(1, call) CASE(2, call) CASE(3, call) CASE(4, call) CASE(5, call) CASE(6, call) }
      if (taken == WIDTH * LANES) PRODUCT(WIDTH, 1)
      else if (taken == LANES) PRODUCT(1, 1)
      else PRODUCT(1, 0)
    }
  }
}

// ------------------------------------------------------------------------------ rows of a matrix

INLINE float half_at(const uint8_t *from, int i) {
  uint8_t room[2 * LANES] = {0};
  float t[LANES];
  memcpy(room, from + 2 * i, 2);
  store(t, load_half(room));
  return t[0];
}

void unpack(const matrix *m, int output, float *row) {
  const uint8_t *panel = m->panels + output / LANES * panel_bytes(m);
  const int lane = output % LANES;
  for (int k = 0; k < m->inputs; ++k) {
    const uint8_t *block = panel + (size_t)(k / block_inputs[m->form]) * block_bytes[m->form];
    const int j = k % 32;
    if (m->form == FLOAT) memcpy(row + k, block + 4 * lane, 4);
    else if (m->form == HALF) { uint16_t x; memcpy(&x, block + 4 * lane + 2 * (k % 2), 2); row[k] = wide(x); }
    else if (m->form == Q8) row[k] = (float)(block[64 * (j / 4) + 4 * lane + j % 4] - 128) * half_at(block + 512, lane);
    else {
      const int q = block[64 * (j / 8) + 4 * lane + j % 4] >> (j % 8 / 4 * 4) & 15;
      row[k] = m->form == Q4 ? (float)(q - 8) * half_at(block + 256, lane)
                             : __builtin_fmaf((float)q, half_at(block + 256, lane), half_at(block + 288, lane));
    }
  }
}
