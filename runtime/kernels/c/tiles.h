// Tiles of several rows, which read a weight once for all: what linear.c (floats), blocks.c and k_blocks.c have in common.
// They are three files because compilers take most of their time for tiles, and compile several files at once.

#pragma once

#include "linear.h"

#if VECTOR_BYTES == 64
enum { MOST_ROWS = 8, FEW_ROWS = 6, WIDTH = 4, NARROW = 3 };  // of a tile: rows; panels of few rows, of more
#elif VECTOR_BYTES == 32 || defined(__aarch64__)
enum { MOST_ROWS = 6, FEW_ROWS = 6, WIDTH = 1, NARROW = 1 };
#else  // with neither many nor wide registers a larger tile gains nothing, and compiles for minutes
enum { MOST_ROWS = 2, FEW_ROWS = 2, WIDTH = 1, NARROW = 1 };
#endif

// Inputs of blocks: q = round(x / s), and beside it s and s times the sum of q. Weights' offsets are taken away in
// integers, so there is what sums begin at: the sum of q times each offset; of Q6K's that of either half, and half of
// that, which fits 16 bits. (Of a shift in the tile gcc makes one of scalars, which then go to vectors one by one.)
typedef struct {
  int8_t q[32];
  float scale, total;
  int32_t start_128, start_8, start_16, starts_32[2];
  int16_t starts_16[2];
} inputs_block;

typedef struct {  // where a tile's sums go
  const float *bias, *residual;
  float *y, scale;
  size_t step;
  int outputs;
} target;

// Write the sums [rows, panels, 16] of a tile that begins at this row and output.
void put(const float *sums, int rows, int panels, const target *to, int row, int output);

// All rows of some panels of blocks; `k_block_panels` has the forms that share scales over 256 inputs.
typedef void compute_panels(const matrix *m, int first, int count, int rows, const uint8_t *x, size_t x_step, const target *to);
compute_panels block_panels, k_block_panels;

#define ROWS _Pragma("GCC unroll 8") for (int r = 0; r < R; ++r)
#define PANELS _Pragma("GCC unroll 4") for (int p = 0; p < P; ++p)

// Only such tiles as there are: one of more rows than the file's TILE_ROWS is no code at all.
#define CASE(r, call) case r: if (r <= TILE_ROWS) { call(r); } break;
#define FEW_CASES(call) CASE(1, call) CASE(2, call) CASE(3, call) CASE(4, call) CASE(5, call) CASE(6, call)
#define MANY_CASES(call) CASE(4, call) CASE(5, call) CASE(6, call) CASE(7, call) CASE(8, call)
#define ALL_CASES(call) FEW_CASES(call) CASE(7, call) CASE(8, call)

// How many of the rows that are left a tile takes: as many as the others, if there are to be more. So of
// more than FEW_ROWS rows none has fewer than four.
INLINE int rows_of_tile(int left, int most) { return left <= most ? left : left < 2 * most ? (left + 1) / 2 : most; }
