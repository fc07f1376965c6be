// Panels from the rows of GGUF's tensors, and rows from panels. Numbers change their place only.

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

void unpack(const matrix *m, int output, float *row) {
  const int form = m->form, lane = output % LANES, inputs = m->inputs;
  const layout l = layouts[form];
  const uint8_t *step = m->panels + output / LANES * panel_bytes(form, inputs), *shared = step;
  if (form < Q8) {
    for (int k = 0; k < inputs; ++k) {
      const uint8_t *at = step + place_of_number(form, lane, k);
      if (form == FLOAT) memcpy(row + k, at, 4);
      else row[k] = form == FLOAT16 ? half_at(at) : wide(*(const uint16_t *)at);
    }
    return;
  }
  const int offset = form == Q8 ? 128 : form == Q4 ? 8 : form == Q5 ? 16 : form == Q6K ? 32 : 0;
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
