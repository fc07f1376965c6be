// Tiles of weights in blocks of 32 inputs (linear.c has the argument of exactness).

#include "tiles.h"

#if VECTOR_BYTES == 32 && !defined(__AVXVNNI__)  // products are added up in 16 bits first, as far as they fit
#define IN_16_BITS(function, a, b) (ivec)_mm256_##function##_epi16((__m256i)(a), (__m256i)(b))
enum { HAS_16_BITS = 1 };
#else
#define IN_16_BITS(function, a, b) ((void)(b), a)
enum { HAS_16_BITS = 0 };
#endif

// On AVX2 a row has one sum in a register, where linear.c's has two: so there is room for more rows. With AVX-VNNI
// more rows are not measured.
enum { TILE_ROWS = HAS_16_BITS ? 8 : MOST_ROWS };

INLINE ivec same(const void *from) { return four(from) - (ivec){0}; }

#define ROW(r) ((const inputs_block *)(x + (r) * x_step))
#define START(r) same(form == Q8 ? &ROW(r)->start_128 : form == Q5 ? &ROW(r)->start_16 : &ROW(r)->start_8)
#define GROUPS _Pragma("GCC unroll 4") for (int g = c; g < c + chunk; ++g)

INLINE void add_blocks(const int R, const int form, const uint8_t *w, int inputs, const uint8_t *x, size_t x_step,
                       lanes sums[][WIDTH]) {
  const layout l = layouts[form];
  const int is_k = form >= Q4K;
  const int is_16 = HAS_16_BITS && form != Q8;
  const int fitting = form == Q6K ? 2 : l.plane ? 4 : 8;  // groups whose products fit: with numbers up to 63, 31, 15
  const int chunk = is_16 && fitting < 8 ? fitting : 1;  // groups whose weights are in registers at once
  // Bytes ahead that are fetched. Many rows compute about as long as memory takes: fetched later, weights would come late.
  const int ahead = R <= 3 ? 4096 : 8192;
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
    ilanes dots[TILE_ROWS];
    EACH {
      AGAIN(x);
      ivec first[TILE_ROWS], second[TILE_ROWS], part[TILE_ROWS], factors[2], above = {0};
      ROWS first[r] = second[r] = (ivec){0};
      if (has_start && !is_16) ROWS first[r] = START(r);
      if (form == Q6K && !is_16) ROWS first[r] = same(ROW(r)->starts_32), second[r] = same(ROW(r)->starts_32 + 1);
      for (int h = 0; h < 2; ++h)
        factors[h] = form == Q6K ? (halves[h].v[i] & 0xffff) | halves[h].v[i] << 16 : 0x10001 - (ivec){0};
#pragma GCC unroll 8
      for (int c = 0; c < 8; c += chunk) {
        ivec weights[4];
        GROUPS {
          const uint8_t *from = w + 64 * (form == Q8 ? g : g / 2) + VECTOR_BYTES * i;
          if (form == Q8 || g % 2 == 0) PREFETCH(from, ahead);
          ivec numbers = load_bytes(from);
          if (form != Q8) numbers = (g % 2 ? numbers >> 4 : numbers) & 0x0f0f0f0f;
          if (form == Q8 && SIGNED_WEIGHTS) numbers ^= (int32_t)0x80808080;
          if (l.plane) {
            if (g == 0 || (form == Q6K && g == 4)) {
              from = bits + 64 * (g / 4) + VECTOR_BYTES * i;
              PREFETCH(from, ahead);
              above = load_bytes(from);
            }
            const int up = form == Q6K ? 4 - 2 * (g % 4) : 4 - g;
            numbers |= (up >= 0 ? above << (up & 7) : above >> (-up & 7)) & (form == Q6K ? 0x30303030 : 0x10101010);
          }
          weights[g - c] = numbers;
        }
        ROWS GROUPS {
          const ivec inputs4 = same(ROW(r)->q + 4 * g);
          if (is_16) {
            const ivec products = IN_16_BITS(maddubs, weights[g - c], inputs4);
            part[r] = g % fitting ? IN_16_BITS(add, part[r], products) : products;
            ORDER(part[r]);
            if (g % fitting == fitting - 1) {
              first[r] += IN_16_BITS(madd, part[r], factors[g / 4]);
              ORDER(first[r]);
            }
          } else {
            ivec *const sum = is_split && (form == Q6K ? g / 4 : g % 2) ? second + r : first + r;
            *sum = form == Q8 ? dot_bytes(*sum, weights[g - c], inputs4) : dot_small(*sum, weights[g - c], inputs4);
            ORDER(*sum);
          }
        }
      }
      ROWS {
        if (is_16 && has_start) first[r] += START(r);
        if (is_16 && form == Q6K)  // half of each start times twice its scale, as a start does not fit
          first[r] += IN_16_BITS(madd, same(ROW(r)->starts_16), (halves[0].v[i] << 1 & 0xffff) | halves[1].v[i] << 17);
        if (form == Q6K && !is_16) dots[r].v[i] = first[r] * halves[0].v[i] + second[r] * halves[1].v[i];
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
  lanes sums[TILE_ROWS][WIDTH];
  ROWS sums[r][0] = all(0);
  add_blocks(R, form, w, inputs, x, x_step, sums);
  float stored[TILE_ROWS * LANES];
  ROWS store(stored + r * LANES, sums[r][0]);
  put(stored, R, 1, to, row, output);
}

#ifdef K_BLOCKS
#define NAME k_block_panels
#define FORMS FORM(Q4K) FORM(Q5K) FORM(Q6K)
#else
#define NAME block_panels
#define FORMS FORM(Q8) FORM(Q4) FORM(Q4M) FORM(Q5) FORM(Q5M)
#endif

void NAME(const matrix *m, int first, int count, int rows, const uint8_t *x, size_t x_step, const target *to) {
  const size_t panel = panel_bytes(m->form, m->inputs);
  for (int p = first; p < first + count; ++p) {
    const uint8_t *w = m->panels + p * panel;
    for (int row = 0, some; row < rows; row += some) {
      some = rows_of_tile(rows - row, TILE_ROWS);
#define TILE(r) tile(r, F, w, m->inputs, x + row * x_step, x_step, to, row, p * LANES)
#define FORM(form) case form: { enum { F = form }; switch (some) { ALL_CASES(TILE) } } break;
      switch (m->form) { FORMS }
    }
  }
}
