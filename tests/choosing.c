// sampling.c
// Prints a digest of all that is chosen for many rows (test_choosing.py).
#include <stdio.h>
#include <stdlib.h>
#include "sampling.h"
int64_t survivors(const choice *, const float *, int, double *, int64_t *);
int64_t leaders(const choice *, const float *, int, int, double *, int64_t *, double *);
static uint64_t digest = 14695981039346656037u;
static void note(const void *from, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) digest = (digest ^ ((const uint8_t *)from)[i]) * 1099511628211u;
}
int main(void) {
  static const int sizes[] = {1, 3, 17, 64, 65, 257, 1000, 4097, 30011};
  uint32_t s = 1;
  for (int n = 0; n < 9; ++n)
    for (int spread = 1; spread < 60; spread *= 4) {
      const int vocab = sizes[n];
      float *x = malloc(vocab * sizeof *x);  // just so long: a sanitizer sees what is read behind it
      double *weights = malloc(vocab * sizeof *weights), sum;
      int64_t *ids = malloc(vocab * sizeof *ids);
      for (int i = 0; i < vocab; ++i) s = s * 1664525 + 1013904223, x[i] = (float)((int)(s >> 8) % 2001 - 1000) * spread * 0.004f;
      for (int way = 0; way < 24; ++way) {
        const choice how = {way % 4 ? 0.4 * (way % 4) : 0, way % 3 ? 0.45 * (way % 3) : 1, way % 5 ? 0 : .1, way, way % 2 ? 30 : 0};
        choice warm = how;
        warm.temperature += 0.2;
        const int64_t token = choose(&how, x, vocab, way), count = survivors(&warm, x, vocab, weights, ids);
        note(&token, sizeof token);
        note(weights, count * sizeof *weights);
        note(ids, count * sizeof *ids);
        const int64_t first = leaders(&warm, x, vocab, vocab < 9 ? vocab : 9, weights, ids, &sum);
        note(ids, first * sizeof *ids);
        note(&sum, sizeof sum);
        const double sure = confidence(x, vocab, vocab / 2);
        note(&sure, sizeof sure);
      }
      free(x), free(weights), free(ids);
    }
  printf("%016llx\n", (unsigned long long)digest);
}
