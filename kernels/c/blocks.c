// Tiles of weights in blocks of 32 inputs (linear.c has the argument of exactness).

#include "tiles.h"

#if VECTOR_BYTES == 32 && !defined(__AVXVNNI__)
#define IN_16_BITS 1  // eight sums of four products of 15 · 127 fit, so pairs are added up last
#else
#define IN_16_BITS 0
#endif

INLINE ivec same(const void *from) { return four(from) - (ivec){0}; }

#define ROW(r) ((const inputs_block *)(x + (r) * x_step))
#define START(r) same(form == Q8 ? &ROW(r)->start_128 : form == Q5 ? &ROW(r)->start_16 : &ROW(r)->start_8)

INLINE void add_blocks(const int R, const int form, const uint8_t *w, int inputs, const uint8_t *x, size_t x_step,
                       lanes sums[][WIDTH]) {
  const layout l = layouts[form];
  const int is_k = form >= Q4K;
  const int is_16 = IN_16_BITS && !l.plane && form != Q8;
  const int has_start = form == Q4 || form == Q5 || (form == Q8 && !SIGNED_WEIGHTS);
  // Few rows have two integer sums each, as one would wait for itself; the halves of Q6K have scales of their own.
  const int is_split = form == Q6K || R <= 2;
  lanes d = all(0), m = all(0), shared_d = all(0), shared_m = all(0);
  for (int b = 0; b < num_blocks(inputs); ++b, w += step_bytes(form), x += sizeof(inputs_block)) {
    if (is_k && b % 8 == 0) {
      shared_d = load_half(w);
      if (has_minima(form)) shared_m = load_half(w + 32);
      w += l.shared;
    }
    const uint8_t *const bits = w + l.numbers, *const scales = bits + l.plane;
    ilanes halves[2] = {iall(0), iall(0)};
    if (form == Q6K) d = shared_d, halves[0] = load_int8(scales), halves[1] = load_int8(scales + LANES);
    else if (is_k) d = mul(shared_d, as_floats(load_uint8(scales)));
    else d = load_half(scales);
    if (is_k && has_minima(form)) m = mul(shared_m, sub(all(0), as_floats(load_uint8(scales + LANES))));
    else if (has_minima(form)) m = load_half(scales + 32);
    ilanes dots[MOST_ROWS];
    EACH {
#if VECTOR_BYTES == 32
      __asm__("" : "+r"(x));
#endif
      ivec first[MOST_ROWS], second[MOST_ROWS], above = {0};
      ROWS first[r] = second[r] = (ivec){0};
      if (has_start && !is_16) ROWS first[r] = START(r);
      if (form == Q6K) ROWS first[r] = same(ROW(r)->starts_32), second[r] = same(ROW(r)->starts_32 + 1);
#pragma GCC unroll 8
      for (int g = 0; g < 8; ++g) {
        const uint8_t *from = w + 64 * (form == Q8 ? g : g / 2) + VECTOR_BYTES * i;
        if (form == Q8 || g % 2 == 0) PREFETCH(from, 4096);
        ivec weights = load_bytes(from);
        if (form != Q8) weights = (g % 2 ? weights >> 4 : weights) & 0x0f0f0f0f;
        if (form == Q8 && SIGNED_WEIGHTS) weights ^= (int32_t)0x80808080;
        if (l.plane) {
          if (g == 0 || (form == Q6K && g == 4)) {
            from = bits + 64 * (g / 4) + VECTOR_BYTES * i;
            PREFETCH(from, 4096);
            above = load_bytes(from);
          }
          const int up = form == Q6K ? 4 - 2 * (g % 4) : 4 - g;
          weights |= (up >= 0 ? above << (up & 7) : above >> (-up & 7)) & (form == Q6K ? 0x30303030 : 0x10101010);
        }
        ROWS {
          const ivec inputs4 = same(ROW(r)->q + 4 * g);
          ivec *const sum = is_split && (form == Q6K ? g / 4 : g % 2) ? second + r : first + r;
#if IN_16_BITS
          if (is_16) *sum = (ivec)_mm256_add_epi16((__m256i)*sum, _mm256_maddubs_epi16((__m256i)weights, (__m256i)inputs4));
          else
#endif
          *sum = form == Q8 ? dot_bytes(*sum, weights, inputs4) : dot_small(*sum, weights, inputs4);
#if VECTOR_BYTES == 32
          __asm__("" : "+x"(*sum));
#endif
        }
      }
#if IN_16_BITS
      if (is_16) ROWS {  // the sums of two would not fit
        first[r] = (ivec)_mm256_madd_epi16((__m256i)first[r], _mm256_set1_epi16(1));
        if (is_split) second[r] = (ivec)_mm256_madd_epi16((__m256i)second[r], _mm256_set1_epi16(1));
        if (has_start) first[r] += START(r);
      }
#endif
      ROWS {
        if (form == Q6K) dots[r].v[i] = first[r] * halves[0].v[i] + second[r] * halves[1].v[i];
        else dots[r].v[i] = is_split ? first[r] + second[r] : first[r];
      }
    }
    ROWS {
      sums[r][0] = fma16(as_floats(dots[r]), mul(d, all(ROW(r)->scale)), sums[r][0]);
      if (has_minima(form)) sums[r][0] = fma16(m, all(ROW(r)->total), sums[r][0]);
    }
  }
}

INLINE void tile(const int R, const int form, const uint8_t *w, int inputs, const uint8_t *x, size_t x_step, const target *to,
                 int row, int output) {
  lanes sums[MOST_ROWS][WIDTH];
  ROWS sums[r][0] = all(0);
  add_blocks(R, form, w, inputs, x, x_step, sums);
  float stored[MOST_ROWS * LANES];
  ROWS store(stored + r * LANES, sums[r][0]);
  put(stored, R, 1, to, row, output);
}

void block_panels(const matrix *m, int first, int count, int rows, const uint8_t *x, size_t x_step, const target *to) {
  const size_t panel = panel_bytes(m->form, m->inputs);
  for (int p = first; p < first + count; ++p) {
    const uint8_t *w = m->panels + p * panel;
    for (int row = 0, some; row < rows; row += some) {
      some = rows_of_tile(rows - row, MOST_ROWS);
#define TILE(r) tile(r, F, w, m->inputs, x + row * x_step, x_step, to, row, p * LANES)
#define BLOCKS(form) case form: { enum { F = form }; switch (some) { ALL_CASES(TILE) } } break;
      switch (m->form) { BLOCKS(Q8) BLOCKS(Q4) BLOCKS(Q4M) BLOCKS(Q5) BLOCKS(Q5M) BLOCKS(Q4K) BLOCKS(Q5K) BLOCKS(Q6K) }
    }
  }
}
