// The gated delta rule of recurrent layers, token by token: bits do not depend on how many come together.

#include "lanes.h"
#include "threads.h"

enum { PARTS = 4, COLUMNS = PARTS * LANES, WIDEST_KEY = 512 };

typedef struct {
  float *state;        // [heads, width, columns], changed in place
  const float *both;   // [tokens, heads, 2, width]: key, query
  const float *value;  // [tokens, heads, columns]
  const float *decay, *beta, *product;  // [tokens, heads]
  float *out;          // [tokens, heads, columns]
  int tokens, heads, width, columns;
} rule;

#define PART for (int j = 0; j < PARTS; ++j)

// Some columns of a head's state over all tokens: S ← decay · S + k ⊗ β (v − decay · Sᵀk), read by q.
static void some_columns(const rule *r, int head, int first) {
  lanes held[WIDEST_KEY][PARTS];
  const int left = r->columns - first;
  float *state = r->state + ((size_t)head * r->width) * r->columns + first;
#define COUNT(j) (left - (j) * LANES < 0 ? 0 : left - (j) * LANES)
  for (int k = 0; k < r->width; ++k) PART held[k][j] = load_some(state + (size_t)k * r->columns + j * LANES, COUNT(j));
  for (int t = 0; t < r->tokens; ++t) {
    const size_t at = (size_t)t * r->heads + head;
    const float *key = r->both + at * 2 * r->width, *query = key + r->width;
    const lanes decay = all(r->decay[at]), beta = all(r->beta[at]), product = all(r->product[at]);
    lanes by_key[PARTS], by_query[PARTS], delta[PARTS];
    PART by_key[j] = by_query[j] = all(0);
    for (int k = 0; k < r->width; ++k) {
      PART by_key[j] = fma16(held[k][j], all(key[k]), by_key[j]);
      PART by_query[j] = fma16(held[k][j], all(query[k]), by_query[j]);
    }
    PART {
      const lanes value = load_some(r->value + at * r->columns + first + j * LANES, COUNT(j));
      delta[j] = mul(sub(value, mul(by_key[j], decay)), beta);
      store_some(r->out + at * r->columns + first + j * LANES, fma16(delta[j], product, mul(by_query[j], decay)), COUNT(j));
    }
    for (int k = 0; k < r->width; ++k) PART held[k][j] = fma16(delta[j], all(key[k]), mul(held[k][j], decay));
  }
  for (int k = 0; k < r->width; ++k) PART store_some(state + (size_t)k * r->columns + j * LANES, held[k][j], COUNT(j));
}

static void all_columns(void *given) {
  const rule *r = given;
  const int groups = (r->columns + COLUMNS - 1) / COLUMNS;
  for (int unit; take(r->heads * groups, 1, &unit) > 0;) some_columns(r, unit / groups, unit % groups * COLUMNS);
}

void delta_steps(float *state, const float *both, const float *value, const float *decay, const float *beta, const float *product,
                float *out, int tokens, int heads, int width, int columns, int threads) {
  rule r = {state, both, value, decay, beta, product, out, tokens, heads, width, columns};
  const size_t work = (size_t)tokens * heads * width * columns;
  run_in_threads(work > 1 << 16 ? threads : 1, all_columns, &r);
}
