// A decoder as Python describes it (decoder.py), and what is fed to it. Structures are read by structs.py, too.

#pragma once

#include "linear.h"
#include "recurrent.h"

enum { NO_NORM, RMS_NORM, LAYER_NORM };
enum { SILU, GELU_TANH, GELU, RELU, RELU_SQUARED, QUICK_GELU };

typedef struct {
  int32_t kind;
  float epsilon;
  const float *weight, *bias;  // or NULL
} norm;

typedef struct {
  int32_t width;           // numbers of a head that turn, in two halves
  const float *cos, *sin;  // [positions, width / 2]
} rope;

// A gated delta net in the place of attention; qkv makes what the convolution reads, z, b and a.
typedef struct {
  convolution c;
  rule r;
  norm norm;                      // of a head's output
  const float *rates, *shifts;    // [heads]: a decay is exp(rate · softplus(a + shift))
} delta;

typedef struct {  // the texts of a forward as a delta net reads them, and what it leaves of each
  const float *const *tails, *const *states;  // [texts]: what came before; NULL: nothing
  float *const *new_tails, *const *new_states;
  float *fed, *mixed, *logs, *betas;  // [rows, …]: what the convolution and the rule read
} net_batch;

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
  const matrix *rarer;  // of the same form, whose outputs come behind those of `output`; or NULL
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
  int32_t only_keys;                       // whether blocks do no more than to keep the input states as keys and values
  const int64_t *places;                   // [rows] where in its slot a row's keys and values lie
  const int64_t *line;                     // [rows, depth] where those of the last ones that it sees lie
  const int64_t *wanted;                   // [num_wanted] rows whose logits are asked for, rising
  const float *input_states;               // [rows, hidden] states, if the model reads such; behind embeddings, without ids
  const int32_t *state_layers;             // [num_states] blocks whose results are asked for; -1: behind the last norm
  int32_t num_texts;
  const int32_t *text_rows;                // [num_texts] rows, one text behind the other
  const net_batch *net_batches;                 // of each delta net, in the order of blocks
  float *states;                           // [num_states, rows, hidden]
  float *logits;                           // [num_wanted, words]
} batch;

int run_decoder(const decoder *d, const batch *f, int threads);  // 0, NO_MEMORY or NO_PLACE (forward.c)
