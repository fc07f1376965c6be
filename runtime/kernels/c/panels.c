// Panels from the rows of GGUF's tensors, and rows from panels. Numbers change their place only.

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "linear.h"

// Where an output's number of input k lies in a panel that has no blocks.
INLINE size_t place_of_number(int form, int lane, int k) {
  const layout l = layouts[form];
  return (size_t)(k / l.inputs) * l.numbers + l.file_bytes * (l.inputs * lane + k % l.inputs);
}

// Where the four numbers from input 4 g of a block on lie: in which of an output's words, which are 16 apart, and how
// far up in its bytes; and so their bits above the lower four.
typedef struct {
  int word, shift;
  uint32_t mask;
  int plane_word, plane_shift;
  uint32_t plane_mask;  // 0: there are none
} place;
INLINE place place_of_four(int form, int g) {
  if (form == Q8) return (place){.word = g, .mask = 0xffffffff};
  if (form == Q6K) return (place){g / 2, 4 * (g % 2), 0x0f0f0f0f, g / 4, 2 * (g % 4), 0x03030303};
  return (place){g / 2, 4 * (g % 2), 0x0f0f0f0f, 0, g, layouts[form].plane ? 0x01010101 : 0};
}

// Write an output's 32 numbers to a block, and read them.
INLINE void put_numbers(int form, const uint8_t *q, int lane, uint8_t *block) {
  uint32_t fours[8], *words = (uint32_t *)block + lane, *plane = (uint32_t *)(block + layouts[form].numbers) + lane;
  memcpy(fours, q, sizeof fours);
  for (int g = 0; g < 8; ++g) {
    const place p = place_of_four(form, g);
    uint32_t *const word = words + LANES * p.word, *const bits = plane + LANES * p.plane_word;
    *word = (p.shift ? *word : 0) | (fours[g] & p.mask) << p.shift;
    if (p.plane_mask) *bits = (p.plane_shift ? *bits : 0) | (fours[g] >> 4 & p.plane_mask) << p.plane_shift;
  }
}
static void get_numbers(int form, const uint8_t *block, int lane, uint8_t *q) {
  const uint32_t *words = (const uint32_t *)block + lane, *plane = (const uint32_t *)(block + layouts[form].numbers) + lane;
  uint32_t fours[8];
  for (int g = 0; g < 8; ++g) {
    const place p = place_of_four(form, g);
    fours[g] = words[LANES * p.word] >> p.shift & p.mask;
    if (p.plane_mask) fours[g] |= (plane[LANES * p.plane_word] >> p.plane_shift & p.plane_mask) << 4;
  }
  memcpy(q, fours, sizeof fours);
}

// What 32 numbers of an output are multiplied by, half by half, and what is added, rounded as gguf does.
static void scales_of(int form, const uint8_t *scales, const uint8_t *shared, int lane, float *d, float *m) {
  const uint8_t *halves = scales + 2 * lane;
  *m = 0;
  if (form < Q4K) {
    d[0] = d[1] = half_at(halves);
    if (has_minima(form)) *m = half_at(halves + 32);
  } else {
    const float factor = half_at(shared + 2 * lane);
    for (int i = 0; i < 2; ++i)
      d[i] = factor * (form == Q6K ? (float)(int8_t)scales[LANES * i + lane] : (float)scales[lane]);
    if (form != Q6K) *m = half_at(shared + 32 + 2 * lane) * -(float)scales[LANES + lane];
  }
}

INLINE int offset_of(int form) { return form == Q8 ? 128 : form == Q4 ? 8 : form == Q5 ? 16 : form == Q6K ? 32 : 0; }
INLINE float number_at(int form, const uint8_t *at) {  // of a form without blocks
  float x;
  if (form == FLOAT) memcpy(&x, at, 4);
  else x = form == FLOAT16 ? half_at(at) : wide(*(const uint16_t *)at);
  return x;
}

void unpack(const matrix *m, int output, float *row) {
  const int form = m->form, lane = output % LANES, inputs = m->inputs;
  const layout l = layouts[form];
  const uint8_t *step = m->panels + output / LANES * panel_bytes(form, inputs), *shared = step;
  if (form < Q8) {
    for (int k = 0; k < inputs; ++k) row[k] = number_at(form, step + place_of_number(form, lane, k));
    return;
  }
  const int offset = offset_of(form);
  for (int b = 0; b < num_blocks(inputs); ++b, step += step_bytes(form)) {
    if (l.shared && b % 8 == 0) shared = step, step += l.shared;
    float d[2], least;
    uint8_t q[32];
    scales_of(form, step + l.numbers + l.plane, shared, lane, d, &least);
    get_numbers(form, step, lane, q);
    for (int j = 0; j < 32 && 32 * b + j < inputs; ++j) {
      const float whole = (float)(q[j] - offset);
      row[32 * b + j] = has_minima(form) ? __builtin_fmaf(whole, d[j / 16], least) : whole * d[j / 16];
    }
  }
}

// What belongs to one of 16 outputs, `unit` bytes of every 16 times so many.
INLINE void copy_lane(const uint8_t *from, int lane, uint8_t *to, int to_lane, int bytes, int unit) {
  for (int i = 0; i < bytes; i += LANES * unit) memcpy(to + i + to_lane * unit, from + i + lane * unit, (size_t)unit);
}

void gather(const matrix *m, int count, const int64_t *rows, uint8_t *panels) {
  const layout l = layouts[m->form];
  const int steps = (m->inputs + l.inputs - 1) / l.inputs, numbers = l.numbers + l.plane;
  for (int i = 0; i < count; ++i) {
    const int lane = (int)(rows[i] % LANES), to_lane = i % LANES;
    const uint8_t *from = m->panels + (size_t)(rows[i] / LANES) * panel_bytes(m->form, m->inputs);
    uint8_t *to = panels + (size_t)(i / LANES) * panel_bytes(m->form, m->inputs);
    for (int s = 0; s < steps; ++s, from += step_bytes(m->form), to += step_bytes(m->form)) {
      if (s % 8 == 0) copy_lane(from, lane, to, to_lane, l.shared, 2), from += l.shared, to += l.shared;
      copy_lane(from, lane, to, to_lane, numbers, m->form == FLOAT16 ? 2 : 4);
      copy_lane(from + numbers, lane, to + numbers, to_lane, l.scales, m->form < Q4K ? 2 : 1);
    }
  }
}

// ------------------------------------------------------------------------------- rounding to four bits

enum { TRIES = 5 };  // scales of a block

// Weights of 32 inputs, from 32 b on, of a panel's 16 outputs.
static void load_block(const matrix *m, int panel, int b, lanes *x) {
  const int form = m->form, offset = offset_of(form);
  const layout l = layouts[form];
  const uint8_t *const begin = m->panels + panel * panel_bytes(form, m->inputs);
  if (form < Q8) {
    float row[LANES];
    for (int j = 0; j < 32; ++j) {
      for (int lane = 0; lane < LANES; ++lane)
        row[lane] = 32 * b + j < m->inputs ? number_at(form, begin + place_of_number(form, lane, 32 * b + j)) : 0;
      x[j] = load(row);
    }
    return;
  }
  const uint8_t *const shared = begin + b / 8 * (8 * (size_t)step_bytes(form) + l.shared);
  const uint8_t *const step = shared + l.shared + b % 8 * step_bytes(form);
  float d[2][LANES], least[LANES];
  for (int lane = 0; lane < LANES; ++lane) {
    float halves[2];
    scales_of(form, step + l.numbers + l.plane, shared, lane, halves, least + lane);
    d[0][lane] = halves[0], d[1][lane] = halves[1];
  }
  for (int g = 0; g < 8; ++g) {
    const place p = place_of_four(form, g);
    const lanes factors = load(d[g / 4]), minima = load(least);
    for (int i = 0; i < 4; ++i) {
      ilanes q;
      for (int k = 0; k < VECTORS; ++k) {
        q.v[k] = load_bytes(step + 64 * p.word + VECTOR_BYTES * k) >> (8 * i + p.shift) & (int32_t)(p.mask & 255);
        if (p.plane_mask)
          q.v[k] |= (load_bytes(step + l.numbers + 64 * p.plane_word + VECTOR_BYTES * k) >> (8 * i + p.plane_shift) & (int32_t)(p.plane_mask & 255)) << 4;
      }
      x[4 * g + i] = fma16(as_floats(iadd(q, iall(-offset))), factors, minima);
    }
  }
}

// The nearest float16, ties to even.
INLINE uint16_t half_of(float x) {
  uint32_t bits, small;
  const float size = __builtin_fabsf(x), moved = size + 0.5f;  // a subnormal float16's unit is that of 0.5
  memcpy(&bits, &size, 4), memcpy(&small, &moved, 4);
  const uint32_t usual = ((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112u << 10);
  return (uint16_t)((x < 0) << 15 | (size < 0x1p-14f ? small - 0x3f000000 : size < 65520 ? usual : 0x7c00));
}

INLINE lanes nearest_of_16(lanes x) {  // from -8 to 7
  const lanes magic = all(12582912.0f);  // 1.5 · 2^23: the sum has no room for a fraction
  return sub(add(smaller(larger(x, all(-8)), all(7)), magic), magic);
}

// Round 16 outputs' 32 weights to Q4. Of a few scales that one is taken which leaves the least error, in the square, of
// large weights above all: of weights that are rounded to q with it, the best is Σ x³ q / Σ x² q². Returns whether all
// of it are numbers.
static int round_block(const lanes *x, uint8_t *block) {
  lanes most = all(0), best = all(0), scale = all(0), difference = all(0);
  for (int j = 0; j < 32; ++j) {
    most = pick(less(size_of(most), size_of(x[j])), x[j], most);
    difference = add(difference, sub(x[j], x[j]));
  }
  for (int i = 0; i < TRIES; ++i) {
    const lanes inverse = over(all(-8.8f + 0.4f * (float)i), most);
    lanes product = all(0), square = all(0);
    for (int j = 0; j < 32; ++j) {
      const lanes q = nearest_of_16(mul(x[j], inverse)), xq = mul(x[j], q);
      product = fma16(mul(x[j], x[j]), xq, product), square = fma16(xq, xq, square);
    }
    const lanes tried = over(product, square), gain = mul(product, tried);
    const ilanes is_better = less(best, gain);
    best = pick(is_better, gain, best), scale = pick(is_better, tried, scale);
  }
  float scales[LANES], differences[LANES];
  int fits = 1;
  store(scales, scale), store(differences, difference);
  for (int lane = 0; lane < LANES; ++lane) {
    const uint16_t half = half_of(scales[lane]);
    memcpy(block + layouts[Q4].numbers + 2 * lane, &half, 2);
    fits &= differences[lane] == 0 && (half & 0x7fff) < 0x7c00;
  }
  const lanes inverse = pick(less(all(0), size_of(scale)), over(all(1), scale), all(0));
  for (int word = 0; word < 4; ++word) {  // as place_of_four says
    ilanes four = iall(0);
    for (int j = 0; j < 8; ++j) {
      const lanes q = nearest_of_16(mul(x[8 * word + j], inverse));
      for (int k = 0; k < VECTORS; ++k) four.v[k] |= (__builtin_convertvector(q.v[k], ivec) + 8) << (8 * (j % 4) + 4 * (j / 4));
    }
    memcpy(block + 64 * word, &four, 64);
  }
  return fits;
}

int round_panel(const matrix *m, int panel, uint8_t *to) {
  int fits = 1;
  for (int b = 0; b < num_blocks(m->inputs); ++b) {
    lanes x[32];
    load_block(m, panel, b, x);
    fits &= round_block(x, to + b * (size_t)step_bytes(Q4));
  }
  return fits;
}

// ------------------------------------------------------------------------------------- GGUF's rows

INLINE size_t file_row_bytes(int form, int inputs) {  // whole blocks
  const layout l = layouts[form];
  return (size_t)((inputs + l.file_inputs - 1) / l.file_inputs) * l.file_bytes;
}

// Numbers of 32 inputs, of the `part`-th eighth of the block if it has eight.
INLINE void numbers_of(int form, const uint8_t *block, int part, uint8_t *q) {
  if (form == Q8) {
    for (int j = 0; j < 32; ++j) q[j] = block[2 + j] ^ 0x80;
  } else if (form < Q4K) {
    const uint8_t *from = block + layouts[form].scales / 16;
    uint32_t above = 0;
    if (layouts[form].plane) memcpy(&above, from, 4), from += 4;
    for (int j = 0; j < 16; j += 8) {  // eight at once: byte by byte gcc takes four times as long
      uint64_t pairs, halves[2];
      memcpy(&pairs, from + j, 8);
      for (int i = 0; i < 2; ++i) halves[i] = pairs >> 4 * i & 0x0f0f0f0f0f0f0f0f, memcpy(q + 16 * i + j, halves + i, 8);
    }
    for (int j = 0; layouts[form].plane && j < 32; j += 8) {
      const uint64_t apart = (above >> j & 255) * 0x0101010101010101u & 0x8040201008040201;  // bit i is in byte i
      uint64_t eight;
      memcpy(&eight, q + j, 8);
      eight |= (apart + 0x7f7f7f7f7f7f7f7f) >> 3 & 0x1010101010101010;
      memcpy(q + j, &eight, 8);
    }
  } else if (form == Q6K) {
    const uint8_t *from = block + 64 * (part / 4) + 32 * (part % 2), *above = block + 128 + 32 * (part / 4);
    const int down = part % 4 / 2 * 4;
    for (int j = 0; j < 32; ++j) q[j] = (from[j] >> down & 15) | (above[j] >> 2 * (part % 4) & 3) << 4;
  } else {
    const uint8_t *from = block + (form == Q5K ? 48 : 16) + 32 * (part / 2);
    for (int j = 0; j < 32; ++j) q[j] = from[j] >> 4 * (part % 2) & 15;
    if (form == Q5K)
      for (int j = 0; j < 32; ++j) q[j] |= (block[16 + j] >> part & 1) << 4;
  }
}

static void put_scales(int form, const uint8_t *block, int part, int lane, uint8_t *scales, uint8_t *shared) {
  if (form < Q4K) {
    memcpy(scales + 2 * lane, block, 2);
    if (has_minima(form)) memcpy(scales + 32 + 2 * lane, block + 2, 2);
  } else if (form == Q6K) {
    memcpy(shared + 2 * lane, block + 208, 2);
    scales[lane] = block[192 + 2 * part], scales[LANES + lane] = block[193 + 2 * part];
  } else {
    const uint8_t *packed = block + 4;  // 6 bits each: four scales, four minima; the others' upper bits lie in these
    memcpy(shared + 2 * lane, block, 2);
    memcpy(shared + 32 + 2 * lane, block + 2, 2);
    scales[lane] = part < 4 ? packed[part] & 63 : (packed[part + 4] & 15) | packed[part - 4] >> 6 << 4;
    scales[LANES + lane] = part < 4 ? packed[part + 4] & 63 : packed[part + 4] >> 4 | packed[part] >> 6 << 4;
  }
}

INLINE void repack_panel(int form, const uint8_t *rows, int count, int inputs, uint8_t *step) {
  const size_t row_bytes = file_row_bytes(form, inputs);
  const layout l = layouts[form];
  memset(step, 0, panel_bytes(form, inputs));
  if (form < Q8) {
    for (int k = 0; k < inputs; ++k)
      for (int lane = 0; lane < count; ++lane)
        memcpy(step + place_of_number(form, lane, k), rows + lane * row_bytes + (size_t)k * l.file_bytes, l.file_bytes);
    return;
  }
  uint8_t *shared = step;
  for (int b = 0; b < num_blocks(inputs); ++b, step += step_bytes(form)) {
    const int part = l.file_inputs == 32 ? 0 : b % 8;
    if (l.shared && b % 8 == 0) shared = step, step += l.shared;
    for (int lane = 0; lane < count; ++lane) {
      const uint8_t *block = rows + lane * row_bytes + (size_t)(32 * b / l.file_inputs) * l.file_bytes;
      uint8_t q[32];
      numbers_of(form, block, part, q);
      put_numbers(form, q, lane, step);
      put_scales(form, block, part, lane, step + l.numbers + l.plane, shared);
    }
  }
}

size_t bytes_of(int form, int outputs, int inputs) {
  return (size_t)((outputs + LANES - 1) / LANES) * panel_bytes(form, inputs);
}

void repack(int form, const uint8_t *rows, int first, int count, int inputs, uint8_t *panels) {
  const size_t row_bytes = file_row_bytes(form, inputs);
  for (int row = 0; row < count; row += LANES) {
    const uint8_t *from = rows + row * row_bytes;
    uint8_t *to = panels + (first + row) / LANES * panel_bytes(form, inputs);
    const int some = count - row < LANES ? count - row : LANES;
#define FORM(form) case form: repack_panel(form, from, some, inputs, to); break;
    switch (form) {
      FORM(FLOAT) FORM(FLOAT16) FORM(HALF) FORM(Q8) FORM(Q4) FORM(Q4M) FORM(Q5) FORM(Q5M) FORM(Q4K) FORM(Q5K) FORM(Q6K)
    }
  }
}

void use_large_pages(void *memory, size_t size) {
#ifdef MADV_HUGEPAGE
  if (size >= 1 << 21) madvise(memory, size, MADV_HUGEPAGE);  // a kernel without them refuses
#endif
}

static int fill(int file, uint8_t *to, size_t size, int64_t from) {
  while (size) {
    const ssize_t got = pread(file, to, size, from);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got ? errno : -1;
    to += got, from += got, size -= (size_t)got;
  }
  return 0;
}

int repack_file(int file, const file_matrix *matrices, int count) {
  const size_t at_once = 1 << 18;  // bytes, which stay in a core's cache
  uint8_t *rows = NULL;
  int error = 0;
  for (const file_matrix *m = matrices; m < matrices + count && !error; ++m) {
    const size_t row_bytes = file_row_bytes(m->form, m->inputs), panel = row_bytes * LANES;
    const int step = panel < at_once ? (int)(at_once / panel) * LANES : LANES;
    uint8_t *const grown = realloc(rows, step * row_bytes);
    if (!grown) error = ENOMEM;
    else rows = grown;
    use_large_pages(m->panels, bytes_of(m->form, m->outputs, m->inputs));
    for (int row = 0; row < m->outputs && !error; row += step) {
      const int some = m->outputs - row < step ? m->outputs - row : step;
      error = fill(file, rows, some * row_bytes, m->offset + (int64_t)(row * row_bytes));
      if (!error) repack(m->form, rows, row, some, m->inputs, m->panels);
    }
  }
  free(rows);
  return error;
}
