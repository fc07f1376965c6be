// Drafts by a chain of forwards of one model.

#pragma once

#include "decoder.h"
#include "sampling.h"

typedef struct {  // a text's draft by a chain of forwards (chain.c)
  choice how;
  double least_confidence;  // the draft ends where the product of its tokens' confidence is lower; 0: never
  int32_t limit, count;    // of tokens: at most, and how many were drawn
  int32_t before, forwards;  // forwards that it took
  int64_t position;        // of the first one in the text
  int64_t *tokens;         // [limit], behind `before` tokens of the text, from which further ones are guessed
  double *sure;            // [limit] confidence in them, where a draft may end early
} draft;

// Words of a vocabulary of its own, as a head's: which of the `count` words that are chosen from each of them is.
typedef struct {
  int32_t count;
  const int64_t *ids;  // [outputs], or NULL: they are the first `count` outputs themselves
} vocabulary;
