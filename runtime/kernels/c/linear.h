// Weight matrices in panels of 16 outputs, and products with them.

#pragma once

#include "lanes.h"

// What a panel is made of, for each step of its inputs:
//   FLOAT    16 floats: one input
//   FLOAT16  16 float16: one input
//   HALF     16 pairs of bfloat16: two inputs
// and blocks of 32 inputs: numbers q first, then 16 scales, then perhaps 16 minima.
//   Q8       (q - 128) d       d: float16
//   Q4, Q4M  (q - 8) d         q d + m: float16
//   Q5, Q5M  (q - 16) d        q d + m
//   Q4K, Q5K q (d s) - e m     s, m: bytes; d, e: float16, before each 8 blocks
//   Q6K      (q - 32) (d s)    s: signed bytes, 16 for the first half and 16 for the second; d as above
// Numbers of 8 bits: 8 times 16 times four inputs. Of 4 bits: 4 times, four inputs in the lower bits and
// the next four in the upper ones. Behind them lie bits 4 and above of the longer ones, 16 times four
// bytes: in Q5's, bit g belongs to the four inputs from 4 g on; Q6's have two bits each, and two rows.
// These are GGUF's numbers in another order, one for one.
enum form { FLOAT, FLOAT16, HALF, Q8, Q4, Q4M, Q5, Q5M, Q4K, Q5K, Q6K, NUM_FORMS };

// Bytes of a block's numbers and bits above them, and of what belongs to its 16 outputs: of a step, and before eight.
// And inputs and bytes of a block in a file.
typedef struct { int inputs, numbers, plane, scales, shared, file_inputs, file_bytes; } layout;
static const layout layouts[NUM_FORMS] = {
  [FLOAT] = {1, 64, 0, 0, 0, 1, 4},        [FLOAT16] = {1, 32, 0, 0, 0, 1, 2},      [HALF] = {2, 64, 0, 0, 0, 1, 2},
  [Q8] = {32, 512, 0, 32, 0, 32, 34},      [Q4] = {32, 256, 0, 32, 0, 32, 18},      [Q4M] = {32, 256, 0, 64, 0, 32, 20},
  [Q5] = {32, 256, 64, 32, 0, 32, 22},     [Q5M] = {32, 256, 64, 64, 0, 32, 24},    [Q4K] = {32, 256, 0, 32, 64, 256, 144},
  [Q5K] = {32, 256, 64, 32, 64, 256, 176}, [Q6K] = {32, 256, 128, 32, 32, 256, 210},
};
INLINE int has_minima(int form) { return form == Q4M || form == Q5M || form == Q4K || form == Q5K; }

INLINE int num_blocks(int inputs) { return (inputs + 31) / 32; }
INLINE int step_bytes(int form) { return layouts[form].numbers + layouts[form].plane + layouts[form].scales; }
INLINE size_t panel_bytes(int form, int inputs) {
  const int steps = (inputs + layouts[form].inputs - 1) / layouts[form].inputs;
  return (size_t)steps * step_bytes(form) + (size_t)((steps + 7) / 8) * layouts[form].shared;
}

typedef struct {
  int32_t form, outputs, inputs;
  const uint8_t *panels;
  const float *bias;  // or NULL
} matrix;

typedef struct {  // matrices of the same inputs, their outputs side by side
  int32_t count;
  const matrix *parts[4];
} layer;

int uses_amx(void);
size_t bytes_of(int form, int outputs, int inputs);  // of a matrix's panels
int outputs_of(const layer *l);

// Inputs of rows, as a form wants them, alike for all blocks; so many bytes for each row.
size_t prepared_bytes(int form, int inputs);
void prepare(int form, int inputs, const float *x, void *prepared);
// A part of them: what belongs to the inputs from `begin` to `end`, multiples of 32 but the last.
void prepare_some(int form, int inputs, int begin, int end, const float *x, void *prepared);

// y = residual + scale · (x W + bias), rows of all outputs; no residual: 0. Within a job: all threads
// come here, and have to meet before they read y.
void multiply(const layer *l, int rows, const void *prepared, float *y, const float *residual, float scale);

// The sums of `rows` x `columns` products over `steps`; in rising order, behind what y holds if `adds`.
// Step k's floats (or bfloat16, if `is_half`) for 16 columns begin at w + k · w_step, and those
// for the next 16 columns lie behind them. Writes whole lanes, but reads and writes no column that is not there.
// What will be read next can be fetched from memory meanwhile.
typedef struct {
  int rows, columns, steps;
  const float *x;  // [rows, steps]
  size_t x_step;
  const void *w;
  size_t w_step;
  int is_half;
  float *y;
  size_t y_step;
  int adds;
  const void *ahead;
  size_t ahead_bytes;
} product;
void multiply_floats(const product *of);

// Row number `output` of a matrix [inputs].
void unpack(const matrix *m, int output, float *row);

// Panels of some rows of a matrix: the same numbers.
void gather(const matrix *m, int count, const int64_t *rows, uint8_t *panels);

// Rows `first` to `first + count` of a file's tensor, in GGUF's type of the same numbers, to panels;
// `first` is a multiple of 16. Nothing lies behind the last row.
void repack(int form, const uint8_t *rows, int first, int count, int inputs, uint8_t *panels);

// Let memory of whole pages be large pages, where the system has them.
void use_large_pages(void *memory, size_t size);

// A matrix that begins at a file's byte `offset`, and where its panels go.
typedef struct {
  int64_t offset;
  int form, outputs, inputs;
  uint8_t *panels;
} file_matrix;

// Read matrices of a file into panels. Returns 0, the system's error, or -1 where the file ends too early.
int repack_file(int file, const file_matrix *matrices, int count);

// A panel of a matrix in Q4: its weights rounded to four bits. Returns 0 if one of them, or a scale, is no number there.
int round_panel(const matrix *m, int panel, uint8_t *to);
