// The blocks of block.py in one call, and the rule of delta nets: the same steps, without Python
// between them.
//
//     x → norm → queries, keys, values → norm, rotation → attention → out → norm → + x
//     x → norm → gate and up → activation → down → norm → + x
//
// Matrix products are torch's, as in Python, and so is the attention of a long prompt's blocks. All
// else is written out here, row by row: what a row gets depends on the row alone, and in attention on
// the keys that it sees. Sums run in as many lanes as a vector has, so that the compiler can use vectors
// without a choice of its own in their order. native.py compiles it.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/quantized/PackedParams.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {

using at::Tensor;
using std::optional;
using Integers = c10::intrusive_ptr<LinearPackedParamsBase>;
using Scalars = c10::List<optional<at::Scalar>>;

#ifdef __AVX512F__
constexpr int64_t kLanes = 16;
#else
constexpr int64_t kLanes = 8;  // a wider vector than the CPU's would be kept in memory
#endif
constexpr int64_t kGrain = 1 << 15;  // numbers that are worth a thread
constexpr int64_t kWidestHead = 512;
constexpr int64_t kTogether = 4;     // queries that read a key together
constexpr float kTiny = 1e-30f;  // the scale of a row of zeros, as in int8.py

// ------------------------------------------------------------------------------ arithmetic

using Lanes = float __attribute__((vector_size(kLanes * 4)));
using Ints = int32_t __attribute__((vector_size(kLanes * 4)));
using Shorts = uint16_t __attribute__((vector_size(kLanes * 2)));

inline Ints bits_of(Lanes x) { return (Ints)x; }
inline Lanes from_bits(Ints x) { return (Lanes)x; }

// Up to so many numbers; the others are 0.
inline Lanes load(const float* from, int64_t count) {
  Lanes x = {};
  std::memcpy(&x, from, count == kLanes ? sizeof x : count * sizeof *from);
  return x;
}

inline Lanes load(const at::BFloat16* from, int64_t count) {
  Shorts x = {};
  std::memcpy(&x, from, count == kLanes ? sizeof x : count * sizeof *from);
  Ints wide;  // in a loop, of which g++ makes better code than of __builtin_convertvector
  for (int64_t j = 0; j < kLanes; ++j) wide[j] = x[j] << 16;
  return from_bits(wide);
}

inline void store(float* to, Lanes x, int64_t count) {
  std::memcpy(to, &x, count == kLanes ? sizeof x : count * sizeof *to);
}

inline void store(at::BFloat16* to, Lanes x, int64_t count) {
  Ints bits = bits_of(x);
  Ints rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to the nearest, ties to even
  rounded = x == x ? rounded : 0x7fc0;                        // a NaN stays one
  Shorts halves = __builtin_convertvector(rounded, Shorts);
  std::memcpy(to, &halves, count == kLanes ? sizeof halves : count * sizeof *to);
}

// f(i, count) for the numbers i to i + count - 1 of a row; the last ones may be fewer than kLanes.
// The compiler sees N calls at once.
template <int64_t N = 1, typename F>
inline void by_lanes(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + N * kLanes <= n; i += N * kLanes)
    for (int64_t j = 0; j < N; ++j) f(i + j * kLanes, kLanes);
  for (; N > 1 && i + kLanes <= n; i += kLanes) f(i, kLanes);
  if (i < n) f(i, n - i);
}

template <typename T>
float sum_of_squares(const T* x, int64_t n) {
  Lanes sums = {};
  by_lanes(n, [&](int64_t i, int64_t count) {
    Lanes part = load(x + i, count);
    sums += part * part;
  });
  float sum = 0;
  for (int64_t j = 0; j < kLanes; ++j) sum += sums[j];
  return sum;
}

// The largest size in a row. A NaN stays, so that it is not lost among the integers.
template <typename T>
float largest(const T* x, int64_t n) {
  Lanes most = {};
  by_lanes(n, [&](int64_t i, int64_t count) {
    Lanes size = from_bits(bits_of(load(x + i, count)) & 0x7fffffff);
    most = (most >= size) | (most != most) ? most : size;
  });
  float result = kTiny;
  for (int64_t j = 0; j < kLanes; ++j)
    result = result >= most[j] || result != result ? result : most[j];
  return result;
}

// exp(x) for |x| up to 87, by a polynomial on half of ln 2 to each side; within 2 units in the
// last place. Written out, as a library's vectors and its single numbers differ in bits.
inline Lanes exponential(Lanes x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 87.0f ? 87.0f : x;
  Lanes scaled = x * 1.44269504f;
  Ints whole = __builtin_convertvector(scaled + (scaled < 0.0f ? -0.5f : 0.5f - Lanes{}), Ints);
  Lanes n = __builtin_convertvector(whole, Lanes);
  Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Lanes p = r * 1.98756915e-4f + 1.39819995e-3f;
  p = p * r + 8.33345190e-3f;
  p = p * r + 4.16657962e-2f;
  p = p * r + 1.66666657e-1f;
  p = p * r + 5.00000012e-1f;
  p = p * r * r + r + 1.0f;
  return p * from_bits((whole + 127) << 23);
}

// x times a sigmoid: of x itself (silu), or of what the tanh in gelu's approximation is made of.
inline Lanes activated(Lanes x, bool is_gelu) {
  Lanes z = is_gelu ? 1.59576912f * (x + 0.044715f * x * x * x) : x;
  return x / (1.0f + exponential(-z));
}

template <typename F>
void for_rows(int64_t rows, int64_t width, const F& one) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) one(row);
  });
}

// ------------------------------------------------------------------------------------ parts

struct Norm {
  Tensor weight;  // [D], or one row for each head; undefined where there is no norm
  double epsilon = 0;

  explicit operator bool() const { return weight.defined(); }

  template <typename T>
  float factor(const T* x, int64_t n) const {
    return 1.0f / std::sqrt(sum_of_squares(x, n) / float(n) + float(epsilon));
  }
};

// x [N, D] normed, and added to a residual if there is one.
template <typename T>
Tensor normed(const Tensor& x, const Norm& norm, const Tensor* residual) {
  int64_t width = x.size(1);
  Tensor result = at::empty_like(x);
  const T* given = x.const_data_ptr<T>();
  const T* weight = norm.weight.const_data_ptr<T>();
  const T* added = residual ? residual->const_data_ptr<T>() : nullptr;
  T* out = result.mutable_data_ptr<T>();
  for_rows(x.size(0), width, [&](int64_t row) {
    const T* from = given + row * width;
    float factor = norm.factor(from, width);
    by_lanes(width, [&](int64_t i, int64_t count) {
      Lanes value = load(from + i, count) * factor * load(weight + i, count);
      if (added) value += load(added + row * width + i, count);
      store(out + row * width + i, value, count);
    });
  });
  return result;
}

// A linear layer of linear.py (packed floats) or of int8.py.
struct Linear {
  Tensor weight;
  optional<Tensor> bias;
  Integers integers;
  int64_t most_rows = 0;  // of a call; 0: any number
  int64_t most = 0, zero = 0;  // of the inputs' integers

  template <typename T>
  Tensor operator()(const Tensor& x, const Tensor* residual = nullptr) const {
    if (integers) return quantised<T>(x, residual);
    if (residual) {
      static auto op = c10::Dispatcher::singleton()
                           .findSchemaOrThrow("mkldnn::_linear_pointwise", "binary")
                           .typed<Tensor(const Tensor&, const Tensor&, const Tensor&,
                                         const optional<Tensor>&, std::string_view)>();
      return op.call(x, *residual, weight, bias, "add");
    }
    if (most_rows && x.size(0) > most_rows) {
      std::vector<Tensor> parts;
      for (const Tensor& part : x.split(most_rows)) parts.push_back((*this).operator()<T>(part));
      return at::cat(parts);
    }
    static auto op = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
                         .typed<Tensor(const Tensor&, const Tensor&, const optional<Tensor>&,
                                       std::string_view, Scalars, optional<std::string_view>)>();
    return op.call(x, weight, bias, "none", Scalars(), "");
  }

  template <typename T>
  Tensor quantised(const Tensor& x, const Tensor* residual) const {
    int64_t rows = x.size(0), width = x.size(1);
    Tensor scaled = at::empty({rows, width}, x.options().dtype(at::kFloat));
    std::vector<float> scales(rows);
    const T* given = x.const_data_ptr<T>();
    float* to = scaled.mutable_data_ptr<float>();
    for_rows(rows, width, [&](int64_t row) {
      const T* from = given + row * width;
      float scale = scales[row] = largest(from, width);
      by_lanes(width, [&](int64_t i, int64_t count) {
        store(to + row * width + i, load(from + i, count) / scale, count);
      });
    });
    Tensor sums =
        integers->apply_with_input_q_dq_qweight_dq_output_fp32(scaled, 1.0 / double(most), zero);
    int64_t outputs = sums.size(1);
    Tensor result = x.scalar_type() == at::kFloat ? sums : at::empty({rows, outputs}, x.options());
    const float* read = sums.const_data_ptr<float>();
    const float* shift = bias ? bias->const_data_ptr<float>() : nullptr;
    const T* added = residual ? residual->const_data_ptr<T>() : nullptr;
    T* out = result.mutable_data_ptr<T>();
    for_rows(rows, outputs, [&](int64_t row) {
      by_lanes(outputs, [&](int64_t i, int64_t count) {
        Lanes value = load(read + row * outputs + i, count) * scales[row];
        if (shift) value += load(shift + i, count);
        if (added) value += load(added + row * outputs + i, count);
        store(out + row * outputs + i, value, count);
      });
    });
    return result;
  }
};

struct Block {
  Norm input_norm, out_norm, mlp_norm, down_norm, qk_norm;
  Linear qkv, out, up, down;
  int64_t kind = 0;    // of attention: which rotations and mask are its own
  int64_t window = 0;  // how many keys a token sees, itself included; 0: all before it
  bool is_gated = true, is_gelu = false;
};

// Where the rows of a forward stand, and what its blocks share.
struct Forward {
  std::vector<Tensor> cos, sin;      // by kind: [N, head_dim]; none where nothing is rotated
  std::vector<Tensor> masks;         // by kind: [1, 1, rows, L] for torch's attention, or none
  std::vector<Tensor> keys, values;  // by block: [slots, heads, capacity, head_dim]
  const int64_t *slots, *positions;  // [N] in the text; slot -1: the row is a pad
  const int64_t* places;             // [N] where in its slot a row's keys and values lie
  const int64_t* line;               // [N, depth] where those of its last tokens and its own lie
  int64_t depth;                     // tokens before these lie where they stand in the text
};

// -------------------------------------------------------------------------------- attention
//
// Of a token to the keys that it sees, and no others: neither its neighbours nor the length of what
// is held beside it change a bit, and nothing is computed for pads. Keys are read in the text's order,
// wherever they lie: a token of a branch gets the bits that it would get in a chain.

// The sums of neighbours: a's and then b's.
inline Lanes pairs(Lanes a, Lanes b) {
#ifdef __AVX512F__
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#else
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#endif
#ifdef __clang__
  return __builtin_shufflevector(a, b, EVEN) + __builtin_shufflevector(a, b, ODD);
#else
  return __builtin_shuffle(a, b, Ints{EVEN}) + __builtin_shuffle(a, b, Ints{ODD});
#endif
}

// Each vector's sum of lanes; all of them are added in the same order.
inline Lanes across(Lanes (&x)[kLanes]) {
  for (int64_t half = kLanes / 2; half; half /= 2)
    for (int64_t i = 0; i < half; ++i) x[i] = pairs(x[2 * i], x[2 * i + 1]);
  return x[0];
}

// One token's G queries of the same keys and values [capacity, width].
template <typename T, int G>
struct Attention {
  const T *keys, *values;
  int64_t width, begin, end;  // of a head; the first position that is seen, and one behind the last
  float scaling;
  std::vector<float>& room;
  const int64_t* line;  // where the keys from position `base` on lie
  int64_t base;
  int64_t first = begin / kLanes * kLanes, length = (end - first + kLanes - 1) / kLanes * kLanes;

  int64_t place(int64_t key) const { return key < base ? key : line[key - base]; }

  // queries [G, width] -> out [G, width]
  void operator()(const T* queries, T* out) const {
    room.resize(G * length);
    Lanes most[G];
    score(queries, most);
    float sums[G];
    for (int g = 0; g < G; ++g) sums[g] = exponentials(&room[g * length], most[g]);
    int64_t i = 0;
    for (; i + 4 * kLanes <= width; i += 4 * kLanes) mix<4>(i, kLanes, sums, out);
    for (; i + kLanes <= width; i += kLanes) mix<1>(i, kLanes, sums, out);
    if (i < width) mix<1>(i, width - i, sums, out);
  }

  // Products of queries and keys, scaled; and the largest ones, by lane.
  void score(const T* queries, Lanes (&most)[G]) const {
    alignas(64) float wide[G][kWidestHead + kLanes];
    for (int g = 0; g < G; ++g) {
      most[g] = Lanes{} - INFINITY;
      by_lanes(width, [&](int64_t i, int64_t count) {
        store(wide[g] + i, load(queries + g * width + i, count), count);
      });
    }
    Lanes products[G][kLanes] = {};
    for (int64_t at = first; at < end; at += kLanes) {
      for (int64_t key = std::max(begin, at); key < std::min(end, at + kLanes); ++key) {
        const T* from = keys + place(key) * width;
        Lanes sums[G] = {};
        by_lanes<4>(width, [&](int64_t i, int64_t count) {
          Lanes part = load(from + i, count);
          for (int g = 0; g < G; ++g) sums[g] += load(wide[g] + i, count) * part;
        });
        for (int g = 0; g < G; ++g) products[g][key - at] = sums[g];
      }
      for (int g = 0; g < G; ++g) {
        Lanes scores = across(products[g]) * scaling;
        scores = is_seen(at) ? scores : Lanes{} - INFINITY;
        most[g] = scores > most[g] ? scores : most[g];
        store(&room[g * length + at - first], scores, kLanes);
      }
    }
  }

  Ints is_seen(int64_t at) const {
    Ints place;
    for (int32_t j = 0; j < kLanes; ++j) place[j] = int32_t(at) + j;
    return (place >= int32_t(begin)) & (place < int32_t(end));
  }

  // Scores to exponentials of their distance from the largest; returns their sum.
  float exponentials(float* scores, const Lanes& most) const {
    float top = most[0], sum = 0;
    for (int64_t j = 1; j < kLanes; ++j) top = std::max(top, most[j]);
    Lanes sums = {};
    for (int64_t at = first; at < end; at += kLanes) {
      Lanes found = exponential(load(scores + at - first, kLanes) - top);
      found = is_seen(at) ? found : 0.0f;
      sums += found;
      store(scores + at - first, found, kLanes);
    }
    for (int64_t j = 0; j < kLanes; ++j) sum += sums[j];
    return sum;
  }

  // The values' numbers from i on, weighted: N vectors of `count` each.
  template <int N>
  void mix(int64_t i, int64_t count, const float (&sums)[G], T* out) const {
    Lanes mixed[G][N] = {};
    for (int64_t key = begin; key < end; ++key) {
      const T* from = values + place(key) * width + i;
      for (int n = 0; n < N; ++n) {
        Lanes value = load(from + n * kLanes, count);
        for (int g = 0; g < G; ++g) mixed[g][n] += room[g * length + key - first] * value;
      }
    }
    for (int g = 0; g < G; ++g)
      for (int n = 0; n < N; ++n)
        store(out + g * width + i + n * kLanes, mixed[g][n] / sums[g], count);
  }
};

// ------------------------------------------------------------------------------------ stack

struct Stack : torch::CustomClassHolder {
  int64_t heads, kv_heads, head_dim;
  double scaling;
  std::vector<Block> blocks;

  Stack(int64_t heads, int64_t kv_heads, int64_t head_dim, double scaling)
      : heads(heads), kv_heads(kv_heads), head_dim(head_dim), scaling(scaling) {
    TORCH_CHECK(head_dim <= kWidestHead && head_dim % 2 == 0, "heads of ", head_dim);
  }

  // norms: 5 weights, an empty tensor where there is none; then each one's epsilon.
  void begin(int64_t kind, int64_t window, bool is_gated, bool is_gelu, std::vector<Tensor> norms,
             std::vector<double> epsilons) {
    Block block;
    block.kind = kind, block.window = window, block.is_gated = is_gated, block.is_gelu = is_gelu;
    Norm* to[] = {&block.input_norm, &block.out_norm, &block.mlp_norm, &block.down_norm,
                  &block.qk_norm};
    for (size_t i = 0; i < norms.size(); ++i)
      if (norms[i].numel()) *to[i] = Norm{norms[i].contiguous(), epsilons[i]};
    blocks.push_back(block);
  }

  Linear& linear(int64_t which) {
    Block& block = blocks.back();
    Linear* all[] = {&block.qkv, &block.out, &block.up, &block.down};
    return *all[which];
  }

  void floats(int64_t which, Tensor weight, optional<Tensor> bias, int64_t most_rows) {
    linear(which) = Linear{weight, bias, {}, most_rows};
  }

  void integers(int64_t which, Integers packed, optional<Tensor> bias, int64_t most, int64_t zero) {
    linear(which) = Linear{{}, bias, packed, 0, most, zero};
  }

  Tensor run(Tensor x, int64_t begin, int64_t end, std::vector<Tensor> cos, std::vector<Tensor> sin,
             std::vector<Tensor> masks, std::vector<Tensor> keys, std::vector<Tensor> values,
             Tensor slots, Tensor positions, Tensor places, Tensor line, optional<Tensor> read) {
    c10::InferenceMode guard;
    Forward forward{cos, sin, masks, keys, values, slots.const_data_ptr<int64_t>(),
                    positions.const_data_ptr<int64_t>(), places.const_data_ptr<int64_t>(),
                    line.const_data_ptr<int64_t>(), line.size(1)};
    x = x.contiguous();
    for (int64_t i = begin; i < end; ++i, read.reset())
      x = x.scalar_type() == at::kFloat ? one<float>(x, read, i, forward)
                                        : one<at::BFloat16>(x, read, i, forward);
    return x;
  }

  // `given` is what attention reads, where that is not made of x alone.
  template <typename T>
  Tensor one(const Tensor& x, const optional<Tensor>& given, int64_t i, const Forward& forward) const {
    const Block& block = blocks[i];
    Tensor read = given ? given->contiguous()
                  : block.input_norm ? normed<T>(x, block.input_norm, nullptr) : x;
    Tensor joined = block.qkv.template operator()<T>(read);
    Tensor attended = attend<T>(block, joined, i, forward);
    Tensor y = added<T>(block.out, attended, block.out_norm, x);
    read = block.mlp_norm ? normed<T>(y, block.mlp_norm, nullptr) : y;
    return added<T>(block.down, activate<T>(block, block.up.template operator()<T>(read)),
                    block.down_norm, y);
  }

  template <typename T>
  static Tensor added(const Linear& layer, const Tensor& x, const Norm& norm, const Tensor& y) {
    return norm ? normed<T>(layer.template operator()<T>(x), norm, &y)
                : layer.template operator()<T>(x, &y);
  }

  template <typename T>
  static Tensor activate(const Block& block, const Tensor& inner) {
    int64_t width = inner.size(1) / (block.is_gated ? 2 : 1);
    Tensor result = at::empty({inner.size(0), width}, inner.options());
    const T* given = inner.const_data_ptr<T>();
    T* out = result.mutable_data_ptr<T>();
    for_rows(inner.size(0), width * 4, [&](int64_t row) {
      const T* gate = given + row * inner.size(1);
      by_lanes(width, [&](int64_t i, int64_t count) {
        Lanes value = activated(load(gate + i, count), block.is_gelu);
        if (block.is_gated) value *= load(gate + width + i, count);
        store(out + row * width + i, value, count);
      });
    });
    return result;
  }

  // One head's numbers, normed and rotated.
  template <typename T>
  void rotate(const T* x, const Norm& norm, int64_t head, const T* cos, const T* sin,
              T* out) const {
    float wide[kWidestHead + kLanes];
    const T* weight = norm ? norm.weight.const_data_ptr<T>() + head * head_dim : nullptr;
    float factor = norm ? norm.factor(x, head_dim) : 1.0f;
    by_lanes(head_dim, [&](int64_t i, int64_t count) {
      Lanes value = load(x + i, count);
      if (weight) value = value * factor * load(weight + i, count);
      store(wide + i, value, count);
      if (!cos) store(out + i, value, count);
    });
    int64_t half = head_dim / 2;
    for (int64_t begin = 0; cos && begin < head_dim; begin += half)
      by_lanes(half, [&](int64_t i, int64_t count) {
        Lanes own = load(wide + begin + i, count), other = load(wide + half - begin + i, count);
        store(out + begin + i,
              own * load(cos + begin + i, count) + other * load(sin + begin + i, count), count);
      });
  }

  // Queries, keys and values side by side [N, all heads] -> [N, H · head_dim].
  template <typename T>
  Tensor attend(const Block& block, const Tensor& joined, int64_t i, const Forward& f) const {
    int64_t count = joined.size(0), width = joined.size(1);
    Tensor query = at::empty({count, heads * head_dim}, joined.options());
    const T* given = joined.const_data_ptr<T>();
    const bool turns = !f.cos.empty();
    const T* cos = turns ? f.cos[block.kind].const_data_ptr<T>() : nullptr;
    const T* sin = turns ? f.sin[block.kind].const_data_ptr<T>() : nullptr;
    T* queries = query.mutable_data_ptr<T>();
    T* keys = f.keys[i].mutable_data_ptr<T>();
    T* values = f.values[i].mutable_data_ptr<T>();
    int64_t slot_size = f.keys[i].stride(0), head_size = f.keys[i].stride(1);
    for_rows(count, width, [&](int64_t row) {
      const T *x = given + row * width, *c = turns ? cos + row * head_dim : nullptr,
              *s = turns ? sin + row * head_dim : nullptr;
      for (int64_t h = 0; h < heads; ++h)
        rotate<T>(x + h * head_dim, block.qk_norm, h, c, s, queries + (row * heads + h) * head_dim);
      for (int64_t h = 0; h < kv_heads && f.slots[row] >= 0; ++h) {
        int64_t to = f.slots[row] * slot_size + h * head_size + f.places[row] * head_dim;
        int64_t own = heads + h;
        rotate<T>(x + own * head_dim, block.qk_norm, own, c, s, keys + to);
        std::memcpy(values + to, x + (own + kv_heads) * head_dim, head_dim * sizeof(T));
      }
    });
    if (!f.masks.empty()) return attend_in_blocks(block, query, i, f);
    Tensor result = at::zeros_like(query);
    T* out = result.mutable_data_ptr<T>();
    int64_t groups = heads / kv_heads, longest = 1;
    for (int64_t row = 0; row < count; ++row) longest = std::max(longest, f.positions[row] + 1);
    int64_t grain = std::max<int64_t>(1, 2 * kGrain / (longest * groups * head_dim));
    at::parallel_for(0, count * kv_heads, grain, [&](int64_t begin, int64_t end) {
      std::vector<float> room;
      for (int64_t task = begin; task < end; ++task) {
        int64_t row = task / kv_heads, h = task % kv_heads;
        if (f.slots[row] < 0) continue;
        int64_t seen = f.positions[row] + 1, from = f.slots[row] * slot_size + h * head_size;
        int64_t first = block.window ? std::max<int64_t>(0, seen - block.window) : 0;
        for (int64_t g = 0; g < groups; g += kTogether) {
          int64_t at = (row * heads + h * groups + g) * head_dim;
          auto with = [&](auto together) {
            Attention<T, together()>{keys + from, values + from, head_dim, first, seen,
                                     float(scaling), room, f.line + row * f.depth,
                                     seen - f.depth}(queries + at, out + at);
          };
          switch (std::min(kTogether, groups - g)) {
            case 4: with(std::integral_constant<int, 4>()); break;
            case 3: with(std::integral_constant<int, 3>()); break;
            case 2: with(std::integral_constant<int, 2>()); break;
            default: with(std::integral_constant<int, 1>());
          }
        }
      }
    });
    return result;
  }

  // The same for a block of a prompt, by torch, which is faster for so many rows.
  Tensor attend_in_blocks(const Block& block, const Tensor& query, int64_t i,
                          const Forward& f) const {
    int64_t count = query.size(0), rows = count * heads / kv_heads;
    const Tensor& mask = f.masks[block.kind];
    int64_t slot = *std::max_element(f.slots, f.slots + count);  // of all but pads
    auto seen = [&](const Tensor& buffer) {
      return buffer.narrow(0, slot, 1).narrow(2, 0, mask.size(3));
    };
    Tensor grouped = query.view({count, kv_heads, -1, head_dim}).transpose(0, 1).contiguous();
    Tensor found = std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
        grouped.view({1, kv_heads, rows, head_dim}), seen(f.keys[i]), seen(f.values[i]), 0.0, false,
        mask.narrow(2, 0, rows), scaling));
    found = found.reshape({kv_heads, count, -1, head_dim}).transpose(0, 1);
    return found.reshape({count, heads * head_dim});
  }
};

// ------------------------------------------------------------------------- recurrent layers

// A few columns of a head's state over all tokens: S ← decay · S + k ⊗ β (v − decay · Sᵀk), read by
// q. Row j of a token's `both` [2, K] is its key or query. Tokens lie `heads` heads apart.
constexpr int64_t kVectors = 4, kColumns = kLanes * kVectors;

struct Columns {
  Lanes part[kVectors];
};

inline Columns load_columns(const float* from, int64_t count) {
  Columns x = {};
  std::memcpy(&x, from, count * sizeof *from);
  return x;
}

void delta_columns(float* s, float* out, const float* both, const float* value, const float* decay,
                   const float* beta, const float* product, int64_t tokens, int64_t heads,
                   int64_t width, int64_t columns, int64_t count) {
  Columns held[kWidestHead];
  for (int64_t k = 0; k < width; ++k) held[k] = load_columns(s + k * columns, count);
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t at = t * heads;
    const float *key = both + at * 2 * width, *query = key + width;
    Lanes by_key[kVectors] = {}, by_query[kVectors] = {}, delta[kVectors];
    for (int64_t k = 0; k < width; ++k)
      for (int64_t j = 0; j < kVectors; ++j) {
        by_key[j] += held[k].part[j] * key[k];
        by_query[j] += held[k].part[j] * query[k];
      }
    Columns given = load_columns(value + at * columns, count), found;
    for (int64_t j = 0; j < kVectors; ++j) {
      delta[j] = (given.part[j] - by_key[j] * decay[at]) * beta[at];
      found.part[j] = by_query[j] * decay[at] + delta[j] * product[at];
    }
    std::memcpy(out + at * columns, &found, count * sizeof *out);
    for (int64_t k = 0; k < width; ++k)
      for (int64_t j = 0; j < kVectors; ++j)
        held[k].part[j] = held[k].part[j] * decay[at] + delta[j] * key[k];
  }
  for (int64_t k = 0; k < width; ++k) std::memcpy(s + k * columns, &held[k], count * sizeof *s);
}

// The gated delta rule (recurrent.py) over the tokens of one text, one after the other: a token's
// bits do not depend on how many come with it. state [H, K, V], both [T, H, 2, K], value [T, H, V];
// decay, beta and product [T, H]. Returns the state behind them, and the outputs [T, H, V].
std::tuple<Tensor, Tensor> delta_steps(const Tensor& state, const Tensor& both, const Tensor& value,
                                       const Tensor& decay, const Tensor& beta,
                                       const Tensor& product) {
  for (const Tensor* x : {&state, &both, &value, &decay, &beta, &product})
    TORCH_CHECK(x->is_contiguous() && x->scalar_type() == at::kFloat, "float32, without gaps");
  const int64_t heads = state.size(0), width = state.size(1), columns = state.size(2);
  const int64_t tokens = both.size(0), groups = (columns + kColumns - 1) / kColumns;
  TORCH_CHECK(width <= kWidestHead, "heads are too wide");
  TORCH_CHECK(both.numel() == tokens * heads * 2 * width && decay.numel() == tokens * heads &&
                  value.numel() == tokens * heads * columns && beta.numel() == decay.numel() &&
                  product.numel() == decay.numel(),
              "sizes that do not go together");
  Tensor after = state.clone(), out = at::empty_like(value);
  float *s = after.mutable_data_ptr<float>(), *o = out.mutable_data_ptr<float>();
  const float *b = both.const_data_ptr<float>(), *v = value.const_data_ptr<float>(),
              *d = decay.const_data_ptr<float>(), *w = beta.const_data_ptr<float>(),
              *p = product.const_data_ptr<float>();
  const int64_t grain = std::max<int64_t>(1, kGrain / (tokens * width * kColumns + 1));
  at::parallel_for(0, heads * groups, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t h = i / groups, j = i % groups * kColumns, to = h * columns + j;
      delta_columns(s + h * width * columns + j, o + to, b + h * 2 * width, v + to, d + h, w + h,
                    p + h, tokens, heads, width, columns, std::min(kColumns, columns - j));
    }
  });
  return {after, out};
}

}  // namespace

TORCH_LIBRARY(speculative, library) {
  library.def("delta_steps", &delta_steps);
  library.class_<Stack>("Stack")
      .def(torch::init<int64_t, int64_t, int64_t, double>())
      .def("begin", &Stack::begin)
      .def("floats", &Stack::floats)
      .def("integers", &Stack::integers)
      .def("run", &Stack::run);
}
