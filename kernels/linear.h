// Weight matrices in panels of 16 outputs, and products with them.

#pragma once

#include "lanes.h"

// What a panel is made of, for each step of its inputs:
//   FLOAT  16 floats: one input
//   HALF   16 pairs of bfloat16: two inputs
//   and blocks of 32 inputs, q · d, with numbers first and then 16 scales d of float16:
//   Q8     8 times 16 times 4 bytes, q + 128
//   Q4     4 times 16 times 4 bytes, q + 8: in the lower four bits of four inputs, in the upper ones of the next
//   Q4M    the same, q · d + m with q from 0 to 15; 16 minima m of float16 last
enum form { FLOAT, HALF, Q8, Q4, Q4M, NUM_FORMS };

typedef struct {
  int32_t form, outputs, inputs;
  const uint8_t *panels;
  const float *bias;  // or NULL
} matrix;

// Inputs of rows, as a form wants them; so many bytes for each row.
size_t prepared_bytes(int form, int inputs);
void prepare(int form, int inputs, const float *x, void *prepared);
// A part of them: what belongs to the inputs from `begin` to `end`, multiples of 32 but the last.
void prepare_some(int form, int inputs, int begin, int end, const float *x, void *prepared);

// y = residual + scale · (x W + bias) in rows that lie `y_step` floats apart; no residual: 0. Within
// a job: all threads come here, and have to meet before they read y.
void multiply(const matrix *m, int rows, const void *prepared, float *y, size_t y_step,
              const float *residual, float scale);

// The sums of `rows` x `columns` products over `steps`; in rising order, behind what y holds if `adds`.
// Step k's floats (or bfloat16, if `is_half`) for 16 columns begin at w + k · w_step, and those
// for the next 16 columns lie behind them. Writes whole lanes, but reads and writes no column that is not there.
void multiply_floats(int rows, int columns, int steps, const float *x, size_t x_step, const void *w,
                     size_t w_step, int is_half, float *y, size_t y_step, int adds);

// Row number `output` of a matrix [inputs].
void unpack(const matrix *m, int output, float *row);
