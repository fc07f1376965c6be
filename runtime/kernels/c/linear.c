// Linear layers whose bits depend on a row alone: each output has one accumulator, and its inputs are
// added in rising order. In blocks of 32 inputs, products are integers, which are exact in any order;
// the blocks' sums are added in rising order. So neither the number of rows nor of threads nor the
// place of a row changes a bit. Tiles of several rows read a weight once for all.

#include <sys/syscall.h>
#include <unistd.h>

#include "threads.h"
#include "tiles.h"

enum { TILE_ROWS = MOST_ROWS };

int outputs_of(const layer *l) {
  int sum = 0;
  for (int i = 0; i < l->count; ++i) sum += l->parts[i]->outputs;
  return sum;
}

// ------------------------------------------------------------------------------------ inputs

size_t prepared_bytes(int form, int inputs) {
  size_t bytes = (size_t)inputs * 4;
  if (form == HALF) bytes = (size_t)(inputs + 1) / 2 * (HAS_BF16_DOT ? 4 : 8);
  if (form >= Q8) bytes = (size_t)num_blocks(inputs) * sizeof(inputs_block);
  return (bytes + 63) / 64 * 64;
}

static void quantise(const float *x, int count, inputs_block *to) {
  lanes a = load_some(x, count), b = load_some(x + LANES, count < LANES ? 0 : count - LANES);
  float most = largest16(larger(size_of(a), size_of(b)));
  if (sum16(add(sub(a, a), sub(b, b))) != 0) most = NAN;  // one is no finite number
  ilanes whole[2] = {iall(0), iall(0)};
  to->scale = most != most ? most : 0;
  if (most >= 1e-30f) {  // smaller blocks are zeros: 127 / most would be none
    const float factor = 127 / most;
    const lanes magic = all(12582912.0f);  // 1.5 · 2^23: the sum has no room for a fraction
    to->scale = most / 127;
    whole[0] = iadd(float_bits(add(mul(a, all(factor)), magic)), iall(-0x4b400000));
    whole[1] = iadd(float_bits(add(mul(b, all(factor)), magic)), iall(-0x4b400000));
  }
  const int32_t sums[2] = {isum16(whole[0]), isum16(whole[1])};
  for (int i = 0; i < 2; ++i) store_int8(to->q + LANES * i, whole[i]);
  to->total = to->scale * (float)(sums[0] + sums[1]);
  to->start_128 = -128 * (sums[0] + sums[1]);
  to->start_8 = -8 * (sums[0] + sums[1]);
  to->start_16 = -16 * (sums[0] + sums[1]);
  for (int i = 0; i < 2; ++i) to->starts_32[i] = -32 * sums[i], to->starts_16[i] = (int16_t)(-16 * sums[i]);
}

void prepare_some(int form, int inputs, int begin, int end, const float *x, void *prepared) {
  if (form == FLOAT || form == FLOAT16 || (form == HALF && !HAS_BF16_DOT)) {
    float *to = prepared;
    memcpy(to + begin, x + begin, (size_t)(end - begin) * 4);
    if (form == HALF && end == inputs && inputs % 2) to[inputs] = 0;
  } else if (form == HALF) {
    uint16_t *to = prepared;
    for (int i = begin; i < end; ++i) to[i] = narrow(x[i]);
    if (end == inputs && inputs % 2) to[inputs] = 0;
  } else {
    for (int b = begin / 32; b * 32 < end; ++b)
      quantise(x + b * 32, inputs - b * 32 < 32 ? inputs - b * 32 : 32, (inputs_block *)prepared + b);
  }
}

void prepare(int form, int inputs, const float *x, void *prepared) { prepare_some(form, inputs, 0, inputs, x, prepared); }

// ------------------------------------------------------------------------------------- tiles

void put(const float *sums, int rows, int panels, const target *to, int row, int output) {
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

// Weights of P times 16 outputs lie `panel` bytes apart, those of the next input `step` bytes behind them; the last
// ones may be fewer than 16. `pace` times 64 bytes at `ahead` are fetched with each input.
INLINE void add_products(const int R, const int P, const int form, const int is_whole, int count, const uint8_t *w, size_t panel,
                         size_t step, int inputs, const float *x, size_t x_step, const char *ahead, int pace, lanes sums[][WIDTH]) {
  for (int k = 0; k < inputs; ++k, w += step) {
    lanes weights[WIDTH];
    for (int i = 0; i < pace; ++i, ahead += 64) __builtin_prefetch(ahead);
    if (!pace) PANELS PREFETCH(w + p * panel, 2048);
    PANELS weights[p] = form == FLOAT ? load_some((const float *)(w + p * panel), is_whole ? LANES : count)
                        : form == FLOAT16 ? load_half(w + p * panel)
                                          : load_some_wide((const uint16_t *)(w + p * panel), is_whole ? LANES : count);
    ROWS {
      const lanes one = all(x[r * x_step + k]);
      PANELS sums[r][p] = fma16(one, weights[p], sums[r][p]);
    }
  }
}

INLINE void add_pairs(const int R, const int P, const uint8_t *w, size_t panel, int inputs, const float *x, size_t x_step,
                      lanes sums[][WIDTH]) {
  for (int k = 0; k < (inputs + 1) / 2; ++k) {
    PANELS PREFETCH(w + p * panel + (size_t)k * 64, 2048);
#if HAS_BF16_DOT
    ilanes pairs[WIDTH];
    PANELS memcpy(&pairs[p], w + p * panel + (size_t)k * 64, 64);
    ROWS PANELS sums[r][p].v[0] = (vec)_mm512_dpbf16_ps((__m512)sums[r][p].v[0], (__m512bh)pairs[p].v[0],
                                                        (__m512bh)iall(four(x + r * x_step + k)).v[0]);
#else
    PANELS EACH {
      AGAIN(x);
      const ivec pairs = load_bytes(w + p * panel + (size_t)k * 64 + VECTOR_BYTES * i);
      const vec even = (vec)(pairs << 16), odd = (vec)(pairs & (int32_t)0xffff0000);
      ROWS {
        sums[r][p].v[i] = vec_fma(x[r * x_step + 2 * k] - (vec){}, even, sums[r][p].v[i]);
        sums[r][p].v[i] = vec_fma(x[r * x_step + 2 * k + 1] - (vec){}, odd, sums[r][p].v[i]);
        ORDER(sums[r][p].v[i]);
      }
    }
#endif
  }
}

INLINE void tile(const int R, const int P, const int form, const uint8_t *w, size_t panel, int inputs, const uint8_t *x, size_t x_step,
                 const target *to, int row, int output) {
  lanes sums[TILE_ROWS][WIDTH];
  ROWS PANELS sums[r][p] = all(0);
  if (form == HALF) add_pairs(R, P, w, panel, inputs, (const float *)x, x_step / 4, sums);
  else add_products(R, P, form, 1, LANES, w, panel, form == FLOAT ? 64 : 32, inputs, (const float *)x, x_step / 4, NULL, 0, sums);
  float stored[TILE_ROWS * WIDTH * LANES];
  ROWS PANELS store(stored + (r * P + p) * LANES, sums[r][p]);
  put(stored, R, P, to, row, output);
}

// ---------------------------------------------------------------------- tiles of AMX, for bfloat16

#if HAS_AMX
static int has_amx;
__attribute__((constructor)) static void ask_for_amx(void) {  // as Linux wants it, once for the process
  const int permission = 0x1023, tiles = 18;
  has_amx = !syscall(SYS_arch_prctl, permission, tiles);
}

// What lies there is read next: gcc's own functions for tiles do not tell the compiler so.
#define READ(from) __asm__ volatile("" ::"r"(from) : "memory")

// Up to 16 rows of up to 4 panels, one tile of sums each. A panel's 16 steps are a tile, and so are 32 inputs of the rows.
static void amx_tile(const matrix *m, const uint8_t *w, int panels, int rows, const uint8_t *x, size_t x_step, const target *to,
                     int row, int output) {
  const size_t panel = panel_bytes(HALF, m->inputs);
  const int pairs = (m->inputs + 1) / 2;
  float stored[4 * 16 * LANES];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int k = 0; k < pairs; k += 16) {
    const int is_whole = pairs - k >= 16;
    uint8_t last_rows[16 * 64], last_steps[16 * 64];
    if (!is_whole) {  // what is missing are zeros
      memset(last_rows, 0, sizeof last_rows), memset(last_steps, 0, sizeof last_steps);
      for (int r = 0; r < rows; ++r) memcpy(last_rows + r * 64, x + r * x_step + k * 4, (size_t)(pairs - k) * 4);
    }
    const uint8_t *inputs = is_whole ? x + k * 4 : last_rows;
    READ(inputs);
    _tile_loadd(4, inputs, is_whole ? x_step : 64);
#define PART(p, t) \
  if (p < panels) { \
    const uint8_t *steps = w + p * panel + (size_t)k * 64; \
    if (!is_whole) steps = memcpy(last_steps, steps, (size_t)(pairs - k) * 64); \
    else for (int i = 0; i < 1024; i += 64) PREFETCH(steps + i, 4096); \
    READ(steps); \
    _tile_loadd(t, steps, 64); \
    _tile_dpbf16ps(p, 4, t); \
  }
    PART(0, 5) PART(1, 6) PART(2, 5) PART(3, 6)
  }
#define FOUND(p) if (p < panels) _tile_stored(p, stored + p * LANES, (size_t)panels * 64);
  FOUND(0) FOUND(1) FOUND(2) FOUND(3)
  put(stored, rows, panels, to, row, output);
}

static void amx_panels(const matrix *m, int first, int count, int rows, const uint8_t *x, size_t x_step, const target *to) {
  for (int row = 0, some; row < rows; row += some) {
    some = rows - row < 16 ? rows - row : 16;
    struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } shapes = {.palette = 1};
    for (int t = 0; t < 7; ++t) shapes.bytes[t] = 64, shapes.rows[t] = t < 5 ? some : 16;
    READ(&shapes);
    _tile_loadconfig(&shapes);
    for (int p = first, taken; p < first + count; p += taken) {
      taken = first + count - p < 4 ? first + count - p : 4;
      amx_tile(m, m->panels + p * panel_bytes(HALF, m->inputs), taken, some, x + row * x_step, x_step, to, row, p * LANES);
    }
  }
  _tile_release();
}
#else
enum { has_amx = 0 };
static void amx_panels(const matrix *m, int first, int count, int rows, const uint8_t *x, size_t x_step, const target *to) {}
#endif

int uses_amx(void) { return has_amx; }

// ---------------------------------------------------------------------------- all rows of some panels

INLINE int width_of(int form, int rows) { return form >= Q8 ? 1 : rows > FEW_ROWS ? NARROW : WIDTH; }

static void float_panels(const matrix *m, int first, int count, int rows, const uint8_t *x, size_t x_step, const target *to) {
  const size_t panel = panel_bytes(m->form, m->inputs);
  const int width = width_of(m->form, rows);
  for (int p = first, taken; p < first + count; p += taken) {
    const uint8_t *w = m->panels + p * panel;
    taken = first + count - p >= width ? width : 1;
    for (int row = 0, some; row < rows; row += some) {
      some = rows_of_tile(rows - row, TILE_ROWS);
#define TILE(r) tile(r, P, F, w, panel, m->inputs, x + row * x_step, x_step, to, row, p * LANES)
#define TILES(width, cases) { enum { P = width }; switch (some) { cases(TILE) } }
#define FLOATS(form) \
  case form: { \
    enum { F = form }; \
    if (WIDTH == 1 || taken == 1) TILES(1, ALL_CASES) \
    else if (rows <= FEW_ROWS) TILES(WIDTH, FEW_CASES) \
    else TILES(NARROW, MANY_CASES) \
  } break;
      switch (m->form) { FLOATS(FLOAT) FLOATS(FLOAT16) FLOATS(HALF) }
    }
  }
}

static compute_panels *panels_of(int form) {
  if (form >= Q8) return form >= Q4K ? k_block_panels : block_panels;
  return form == HALF && has_amx ? amx_panels : float_panels;
}

void multiply(const layer *l, int rows, const void *prepared, float *y, const float *residual, float scale) {
  const int grain = width_of(l->parts[0]->form, rows);
  int panels = 0, begin, count;
  for (int i = 0; i < l->count; ++i) panels += (l->parts[i]->outputs + LANES - 1) / LANES;
  const size_t step = (size_t)outputs_of(l);
  const int share = (fair_share(panels, 8) + grain - 1) / grain * grain;
  while ((count = take(panels, share, &begin)) > 0) {
    size_t column = 0;
    for (int i = 0; count > 0; column += l->parts[i++]->outputs) {
      const matrix *part = l->parts[i];
      const int part_panels = (part->outputs + LANES - 1) / LANES, some = part_panels - begin < count ? part_panels - begin : count;
      if (some > 0) {
        const target to = {part->bias, residual ? residual + column : NULL, y + column, scale, step, part->outputs};
        panels_of(part->form)(part, begin, some, rows, prepared, prepared_bytes(part->form, part->inputs), &to);
        count -= some, begin += some;
      }
      begin -= part_panels;
    }
  }
}

// ----------------------------------------------------------------------------- products of floats

INLINE void product_tile(const int R, const int P, const int form, const int is_whole, const product *of, int row, int column,
                         int count, const char *ahead, int pace) {
  lanes sums[TILE_ROWS][WIDTH];
  const size_t bytes = form == FLOAT ? 4 : 2;
  float *y = of->y + row * of->y_step + column;
  ROWS PANELS sums[r][p] = of->adds ? load_some(y + r * of->y_step + p * LANES, is_whole ? LANES : count) : all(0);
  add_products(R, P, form, is_whole, count, (const uint8_t *)of->w + column * bytes, LANES * bytes, of->w_step * bytes, of->steps,
               of->x + row * of->x_step, of->x_step, ahead, pace, sums);
  ROWS PANELS store_some(y + r * of->y_step + p * LANES, sums[r][p], is_whole ? LANES : count);
}

void multiply_floats(const product *of) {
  const int wide = WIDTH * LANES, tiles = (of->rows + FEW_ROWS - 1) / FEW_ROWS * ((of->columns + wide - 1) / wide);
  const size_t fetches = (size_t)tiles * of->steps * 64;
  const int pace = (int)((of->ahead_bytes + fetches - 1) / fetches);
  const char *ahead = of->ahead;
  for (int column = 0, taken; column < of->columns; column += taken) {
    const int left = of->columns - column;
    taken = left >= wide ? wide : left < LANES ? left : LANES;
    for (int row = 0, some; row < of->rows; row += some, ahead += (size_t)pace * of->steps * 64) {
      some = rows_of_tile(of->rows - row, FEW_ROWS);
#define PRODUCT_TILE(r) product_tile(r, P, F, W, of, row, column, taken, ahead, pace)
#define PRODUCT_OF(form, panels, is_whole) { enum { F = form, P = panels, W = is_whole }; switch (some) { FEW_CASES(PRODUCT_TILE) } }
#define PRODUCT(panels, is_whole) { if (of->is_half) PRODUCT_OF(HALF, panels, is_whole) else PRODUCT_OF(FLOAT, panels, is_whole) }
      if (taken == wide) PRODUCT(WIDTH, 1)
      else if (taken == LANES) PRODUCT(1, 1)
      else PRODUCT(1, 0)
    }
  }
}
