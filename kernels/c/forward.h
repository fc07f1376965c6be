// A decoder as Python describes it (decoder.py), and what is fed to it. Structures are read by structs.py, too.

#pragma once

#include "linear.h"
#include "recurrent.h"
#include "sampling.h"

enum { NO_NORM, RMS_NORM, LAYER_NORM };
enum { SILU, GELU_TANH, GELU, RELU, RELU_SQUARED, QUICK_GELU };

typedef struct {
  int32_t kind;
  float epsilon;
  const float *weight, *bias;  // or NULL
} norm;

typedef struct {
  int32_t width;            // numbers of a head that turn, in two halves
  int32_t length;
  const float *cos, *sin;  // [length, width / 2]
} rope;

// A gated delta net in the place of attention; qkv makes what the convolution reads, z, b and a.
typedef struct {
  convolution c;
  rule r;
  norm norm;                      // of a head's output
  const float *rates, *shifts;    // [heads]: a decay is exp(rate · softplus(a + shift))
} delta;

typedef struct {  // what a delta net is given by each text of a forward, and what it leaves
  const float *const *tails, *const *states;  // [texts]: what came before; NULL: nothing
  float *const *new_tails, *const *new_states;
  float *fed, *mixed, *logs, *betas;  // [rows, …]: what the convolution and the rule were given
} passing;

// x → norm → queries, keys, values → norm, rotation → attention → out → norm → + x
// x → norm → gate and up → activation → down → norm → + x
typedef struct {
  norm input_norm, out_norm, mlp_norm, down_norm, query_norm, key_norm;
  layer qkv, out, up, down;  // qkv: all heads' queries, keys, values, and what gates queries' results
  int32_t heads, kv_heads;
  int32_t width, value_width;  // of a head's query and key, and of its value
  int32_t rope;           // its number, or -1
  int32_t window;         // how many keys a token sees, itself included; 0: all before it
  int32_t has_wide_norms;  // of all heads at once
  int32_t has_gates, activation, is_gated, is_half;  // gates of attention; of the MLP; the cache's type
  int32_t looks_ahead;  // not up to the row itself, but to where the batch says
  float scaling, softcap, residual_scale;
  int64_t slots, capacity;
  void *keys, *values;  // [slots, kv_heads, capacity, width or value_width]
  const delta *net;     // or NULL
  const float *sinks;   // [heads]: scores that take their share of the softmax and give nothing; or NULL
} block;

typedef struct {
  int32_t hidden, num_blocks;
  const block *blocks;
  const rope *ropes;
  const matrix *embedding, *positions, *output;  // positions and output may be NULL
  float embedding_scale, logit_scale, logit_softcap;
  norm last_norm, second_norm;  // the second follows the first, or is none
  // A head of another model reads a token's embedding and a state, both normed, side by side: through `entrance`,
  // or without one in the first block's qkv, which then adds what attention finds to the state.
  int32_t has_states, is_state_first, adds_to_normed;
  norm embed_norm, state_norm;
  const matrix *entrance;  // or NULL
} decoder;

typedef struct {
  int32_t rows, num_wanted, depth, shift, num_states;
  const int64_t *ids, *slots, *positions;  // [rows]
  const int64_t *ends;                     // [rows] how many keys of its text a row sees where blocks look ahead
  int32_t only_keys;                       // whether blocks do no more than to keep what is given, as keys and values
  const int64_t *places;                   // [rows] where in its slot a row's keys and values lie
  const int64_t *line;                     // [rows, depth] where those of the last ones that it sees lie
  const int64_t *wanted;                   // [num_wanted] rows whose logits are asked for, rising
  const float *given;                      // [rows, hidden] states, if the model reads such; behind embeddings, without ids
  const int32_t *state_layers;             // [num_states] blocks whose results are asked for; -1: behind the last norm
  int32_t num_texts;
  const int32_t *text_rows;                // [num_texts] rows, one text behind the other
  const passing *passings;                 // of each delta net, in the order of blocks
  float *states;                           // [num_states, rows, hidden]
  float *logits;                           // [num_wanted, words]
} batch;

typedef struct {  // a text's draft by a chain of forwards (chain.c)
  choice how;
  const doubts *may_stop;  // or NULL: a draft has as many tokens as it may
  int32_t limit, count;    // of tokens: at most, and how many were drawn
  int32_t before, forwards;  // forwards that it took
  int64_t position;        // of the first one in the text
  int64_t *tokens;         // [limit], behind `before` tokens of the text, from which further ones are guessed
  double *sure;            // [limit] confidence in them, where a draft may stop
} draft;

// Words of a vocabulary of its own, as a head's: which of the `count` words that are chosen from each of them is.
typedef struct {
  int32_t count;
  const int64_t *ids;  // [outputs], or NULL: they are the first `count` outputs themselves
} vocabulary;

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

int run_decoder(const decoder *d, const batch *f, int threads);  // 0, NO_MEMORY or NO_PLACE

int make_groups(const batch *f, group *groups);
size_t num_partials(const attention *a);
size_t room_floats(const block *b);
void attend(const attention *a);
void collect(const attention *a, int row);  // partial results of a row to its attended, if there are any

// exp(x) for x from -87 to 87, by a polynomial on half of ln 2 to each side; exp(0) is 1.
INLINE lanes exponential(lanes x) {
  x = smaller(larger(x, all(-87)), all(87));
  const lanes magic = all(12582912.0f), shifted = fma16(x, all(1.44269504f), magic);
  const lanes n = sub(shifted, magic);
  const lanes r = fma16(n, all(2.12194440e-4f), fma16(n, all(-0.693359375f), x));
  lanes p = fma16(all(1.9875691500e-4f), r, all(1.3981999507e-3f));
  p = fma16(p, r, all(8.3334519073e-3f));
  p = fma16(p, r, all(4.1665795894e-2f));
  p = fma16(p, r, all(1.6666665459e-1f));
  p = fma16(p, r, all(5.0000001201e-1f));
  p = add(fma16(p, mul(r, r), r), all(1));
  ilanes power;
  EACH power.v[i] = ((ivec)shifted.v[i] - 0x4b400000 + 127) << 23;
  return mul(p, bits_as_floats(power));
}

INLINE lanes sigmoid(lanes x) { return over(all(1), add(all(1), exponential(sub(all(0), x)))); }
// log(1 + exp(x)): log(1 + t) is 2 · artanh(t / (2 + t)).
INLINE lanes softplus(lanes x) {
  const lanes t = exponential(sub(all(0), size_of(x))), s = over(t, add(all(2), t)), z = mul(s, s);
  lanes p = all(1 / 17.0f);
  for (int n = 15; n > 0; n -= 2) p = fma16(p, z, all(1 / (float)n));
  return fma16(add(s, s), p, pick(less(x, all(0)), all(0), x));
}

INLINE lanes tanh16(lanes x) { return sub(all(1), over(all(2), add(exponential(add(x, x)), all(1)))); }

