// Recurrent layers: convolutions over a text's last tokens, and rules that change a state.
//
// Every token of a text is stepped by itself, so its bits depend on the tokens before it alone: not on how
// many come together, nor on other texts. A state is read before and written after, and both may
// be one place. Whoever keeps the state before, and the inputs since, can step again to where it was.

#pragma once

#include "lanes.h"

// y = Σ tap · x over a token and those before it, oldest first, + bias; then silu, if it is wanted.
typedef struct {
  int32_t channels, taps, has_silu;
  const float *weight, *bias;  // [taps, channels]; NULL or [channels]
} convolution;

typedef struct {  // the tokens of one text
  int32_t rows;
  size_t x_step, y_step;  // floats from one row to the next
  const float *x;         // [rows, channels]
  const float *before;    // [taps - 1, channels]: what came before; NULL: nothing
  float *after, *y;       // what comes before the next tokens; [rows, channels]
} conv_text;

// S ← decay · S + k ⊗ v β                       Mamba-2, read by q
// S ← decay · S + k ⊗ (v − decay · Sᵀk) β        a gated delta net (`corrects`), read by q
typedef struct {
  int32_t heads, key_heads, width, columns;  // states [heads, width, columns]
  int32_t corrects, has_norm;                // queries and keys of length 1
  float scale;                               // of queries
} rule;

typedef struct {
  int32_t rows;
  size_t key_step, value_step, head_step;  // of keys and queries, values, logs and betas
  const float *keys, *queries;             // [rows, key_heads, width]
  const float *values;                     // [rows, heads, columns]
  const float *logs, *betas;               // [rows, heads]: decays are exp(logs)
  const float *before;                     // a state; NULL: 0
  float *after, *out;                      // the state behind them; [rows, heads, columns]
} rule_input;

enum { MOST_TAPS = 8192, WIDEST_KEY = 8192 };  // which lie on a thread's stack

// Within a job: all threads come here, and have to meet before they read what was written.
void convolve(const convolution *c, const conv_text *texts, int count);
void step_texts(const rule *r, const rule_input *texts, int count, float *room);  // room_of(r, all rows) floats
size_t room_of(const rule *r, size_t rows);
