// How a token is chosen: what runtime/sampling.py says, with the same bits.

#pragma once

#include <stdint.h>

typedef struct {
  double temperature, top_p, min_p;  // below 1e-6: greedy
  uint64_t seed;                     // of runtime/sampling.py's Noise: scrambled already
  int32_t top_k;
} choice;

// The token after `position` tokens, by scores [vocab]; or NO_NUMBERS or NO_MEMORY.
int64_t choose(const choice *how, const float *scores, int vocab, int64_t position);

// How likely a token is by its scores alone, without any transform: what a drafter is sure of.
double confidence(const float *scores, int vocab, int token);
