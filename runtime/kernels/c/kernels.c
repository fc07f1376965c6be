// What Python calls (library.py): one job of all threads for each call.

#include <stdatomic.h>
#include <stdlib.h>

#include "errors.h"
#include "linear.h"
#include "threads.h"

#if VECTOR_BYTES == 64
#define NAME "AVX-512"
#elif VECTOR_BYTES == 32
#define NAME "AVX2"
#elif defined(__aarch64__)
#define NAME "NEON"
#else
#define NAME "plain"
#endif
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define BYTES NAME " VNNI"
#elif defined(__ARM_FEATURE_DOTPROD)
#define BYTES NAME " DOTPROD"
#else
#define BYTES NAME
#endif

const char *describe(void) { return uses_amx() ? BYTES " AMX" : HAS_BF16_DOT ? BYTES " BF16" : BYTES; }

typedef struct {
  const layer *l;
  int rows;
  const float *x;
  float *y;
  uint8_t *prepared;
} linear_job;

static void linear(void *task) {
  const linear_job *j = task;
  const matrix *m = j->l->parts[0];
  const size_t bytes = prepared_bytes(m->form, m->inputs);
  for (int row; take(j->rows, 1, &row) > 0;)
    prepare(m->form, m->inputs, j->x + (size_t)row * m->inputs, j->prepared + row * bytes);
  meet();
  multiply(j->l, j->rows, j->prepared, j->y, NULL, 1);
}

// y [rows, outputs] = x [rows, inputs] W + bias. Returns 0 or NO_MEMORY.
int apply_linear(const layer *l, int rows, const float *x, float *y, int threads) {
  const matrix *m = l->parts[0];
  linear_job j = {l, rows, x, y, NULL};
  if (posix_memalign((void **)&j.prepared, 64, (size_t)rows * prepared_bytes(m->form, m->inputs) + 64)) return NO_MEMORY;
  run_in_threads(threads, linear, &j);
  free(j.prepared);
  return 0;
}

// Rows of a matrix, such as an embedding's [count, inputs].
void read_rows(const matrix *m, int count, const int64_t *rows, float *to) {
  for (int i = 0; i < count; ++i) unpack(m, (int)rows[i], to + (size_t)i * m->inputs);
}

typedef struct {
  const matrix *m;
  uint8_t *panels;
  atomic_int fits;
} rounding;

static void round_panels(void *task) {
  rounding *j = task;
  for (int panel; take((j->m->outputs + LANES - 1) / LANES, 1, &panel) > 0;)
    if (!round_panel(j->m, panel, j->panels + panel * panel_bytes(Q4, j->m->inputs))) j->fits = 0;
}

// A matrix's panels in Q4. Returns whether they hold it (1 or 0).
int round_matrix(const matrix *m, uint8_t *panels, int threads) {
  rounding j = {m, panels, 1};
  run_in_threads(threads, round_panels, &j);
  return j.fits;
}
