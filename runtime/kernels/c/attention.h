// Attention of the rows of a batch in one block of a decoder.

#pragma once

#include "decoder.h"

// Attention of all rows of one block, by all threads: queries [rows, heads, width] → attended [rows, heads, value_width].
typedef struct {
  const block *b;
  const batch *f;
  const struct group *groups;
  int num_groups;
  const float *queries;
  float *attended, *partials;  // no partials: each thread reads all keys of its rows
  float *rooms;                // of threads, room_floats each
} attention;

typedef struct group {  // rows of one text that stand together
  int32_t first, count;
} group;

enum { KEYS = 256, GROUP_ROWS = 8 };  // keys of a partial result; rows of a group

int make_groups(const batch *f, group *groups);
size_t num_partials(const attention *a, int threads);  // floats; 0: there is work for all threads without them
size_t room_floats(const block *b);
void attend(const attention *a);
void collect(const attention *a, int row);  // partial results of a row to its attended, if there are any
