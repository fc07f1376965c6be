// What differs between CPUs. All else is written for sixteen lanes of floats, which are one register
// of AVX-512, two of AVX2 and four of NEON or SSE. A lane's arithmetic is IEEE 754's: products are
// fused with a sum only where `fma` is written (-ffp-contract=off), so every CPU gives the same bits.
// Only a CPU's own products of bfloat16 (`HAS_BF16_DOT`, `HAS_AMX`) are others.

#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

enum { LANES = 16, VECTORS = 64 / VECTOR_BYTES, PER_VECTOR = VECTOR_BYTES / 4 };

typedef float vec __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t ivec __attribute__((vector_size(VECTOR_BYTES)));
typedef struct { vec v[VECTORS]; } lanes;   // numbers
typedef struct { ivec v[VECTORS]; } ilanes;  // integers, or whether something holds: -1 or 0

#define EACH _Pragma("GCC unroll 4") for (int i = 0; i < VECTORS; ++i)

INLINE int32_t four(const void *from) { int32_t x; memcpy(&x, from, 4); return x; }

INLINE vec vec_fma(vec a, vec b, vec c) {
#if VECTOR_BYTES == 64
  return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VECTOR_BYTES == 32
  return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  vec r;
  for (int j = 0; j < PER_VECTOR; ++j) r[j] = __builtin_fmaf(a[j], b[j], c[j]);
  return r;
#endif
}

INLINE lanes all(float x) { lanes r; EACH r.v[i] = x - (vec){}; return r; }
INLINE ilanes iall(int32_t x) { ilanes r; EACH r.v[i] = x - (ivec){}; return r; }
INLINE lanes fma16(lanes a, lanes b, lanes c) { lanes r; EACH r.v[i] = vec_fma(a.v[i], b.v[i], c.v[i]); return r; }
INLINE lanes add(lanes a, lanes b) { lanes r; EACH r.v[i] = a.v[i] + b.v[i]; return r; }
INLINE lanes sub(lanes a, lanes b) { lanes r; EACH r.v[i] = a.v[i] - b.v[i]; return r; }
INLINE lanes mul(lanes a, lanes b) { lanes r; EACH r.v[i] = a.v[i] * b.v[i]; return r; }
INLINE lanes over(lanes a, lanes b) { lanes r; EACH r.v[i] = a.v[i] / b.v[i]; return r; }
INLINE lanes size_of(lanes a) { lanes r; EACH r.v[i] = (vec)((ivec)a.v[i] & 0x7fffffff); return r; }
INLINE ilanes iadd(ilanes a, ilanes b) { ilanes r; EACH r.v[i] = a.v[i] + b.v[i]; return r; }
INLINE ilanes less(lanes a, lanes b) { ilanes r; EACH r.v[i] = a.v[i] < b.v[i]; return r; }
INLINE ilanes is_nan(lanes a) { ilanes r; EACH r.v[i] = a.v[i] != a.v[i]; return r; }
INLINE ilanes either(ilanes a, ilanes b) { ilanes r; EACH r.v[i] = a.v[i] | b.v[i]; return r; }
INLINE lanes as_floats(ilanes a) { lanes r; EACH r.v[i] = __builtin_convertvector(a.v[i], vec); return r; }
INLINE lanes bits_as_floats(ilanes a) { lanes r; EACH r.v[i] = (vec)a.v[i]; return r; }
INLINE ilanes float_bits(lanes a) { ilanes r; EACH r.v[i] = (ivec)a.v[i]; return r; }
INLINE lanes pick(ilanes is, lanes a, lanes b) {
  lanes r;
  EACH r.v[i] = (vec)((is.v[i] & (ivec)a.v[i]) | (~is.v[i] & (ivec)b.v[i]));
  return r;
}
// A NaN in b is passed over. gcc does not find a CPU's own instruction for it.
#if VECTOR_BYTES == 16
INLINE lanes larger(lanes a, lanes b) { return pick(less(a, b), b, a); }
INLINE lanes smaller(lanes a, lanes b) { return pick(less(b, a), b, a); }
#else
#if VECTOR_BYTES == 64
#define OF_X86(function, a, b) (vec)_mm512_##function##_ps((__m512)(b), (__m512)(a))
#else
#define OF_X86(function, a, b) (vec)_mm256_##function##_ps((__m256)(b), (__m256)(a))
#endif
INLINE lanes larger(lanes a, lanes b) { lanes r; EACH r.v[i] = OF_X86(max, a.v[i], b.v[i]); return r; }
INLINE lanes smaller(lanes a, lanes b) { lanes r; EACH r.v[i] = OF_X86(min, a.v[i], b.v[i]); return r; }
#endif
INLINE lanes numbered(float first) {  // first, first + 1, …
  lanes r;
  EACH for (int j = 0; j < PER_VECTOR; ++j) r.v[i][j] = first + (float)(i * PER_VECTOR + j);
  return r;
}

INLINE lanes load(const float *from) { lanes r; EACH memcpy(&r.v[i], from + i * PER_VECTOR, VECTOR_BYTES); return r; }
INLINE void store(float *to, lanes x) { EACH memcpy(to + i * PER_VECTOR, &x.v[i], VECTOR_BYTES); }
INLINE lanes load_some(const float *from, int count) {  // the others are 0
  float t[LANES] = {0};
  if (count >= LANES) return load(from);
  memcpy(t, from, (size_t)count * sizeof *t);
  return load(t);
}
INLINE void store_some(float *to, lanes x, int count) {
  float t[LANES];
  if (count >= LANES) { store(to, x); return; }
  store(t, x);
  memcpy(to, t, (size_t)count * sizeof *t);
}

// bfloat16: the upper half of a float. Rounded to the nearest, ties to even; a NaN stays one.
INLINE float wide(uint16_t x) { uint32_t b = (uint32_t)x << 16; float f; memcpy(&f, &b, 4); return f; }
INLINE uint16_t narrow(float x) {
  uint32_t b;
  memcpy(&b, &x, 4);
  return x != x ? 0x7fc0 : (uint16_t)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
INLINE lanes load_wide(const uint16_t *from) {
  lanes r;
#if VECTOR_BYTES == 64
  r.v[0] = (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from)), 16);
#elif VECTOR_BYTES == 32
  EACH r.v[i] = (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(from + 8 * i))), 16);
#else
  EACH { ivec w; for (int j = 0; j < PER_VECTOR; ++j) w[j] = (int32_t)((uint32_t)from[i * PER_VECTOR + j] << 16); r.v[i] = (vec)w; }
#endif
  return r;
}

INLINE lanes load_some_wide(const uint16_t *from, int count) {
  uint16_t t[LANES] = {0};
  if (count >= LANES) return load_wide(from);
  memcpy(t, from, (size_t)count * sizeof *t);
  return load_wide(t);
}

// float16, of scales. A NaN becomes a quiet one, as CPUs' own instructions make it.
#if VECTOR_BYTES == 16
typedef uint16_t halves __attribute__((vector_size(8)));
INLINE vec from_halves(halves h) {
#if defined(__aarch64__)
  return (vec)vcvt_f32_f16((float16x4_t)h);
#else
  const ivec bits = __builtin_convertvector(h, ivec), size = bits & 0x7fff, is_finite = size < 0x7c00;
  const ivec normal = (size << 13) + (is_finite & 112 << 23);
  const ivec unending = ~is_finite & (0x7f800000 | (-(size > 0x7c00) << 22));
  const vec subnormal = __builtin_convertvector(size, vec) * 0x1p-24f;
  const ivec is_small = size < 0x400;
  return (vec)((is_small & (ivec)subnormal) | (~is_small & (normal | unending)) | (bits & 0x8000) << 16);
#endif
}
#endif
INLINE float half_at(const uint8_t *from) {
#if VECTOR_BYTES >= 32
  uint16_t half;
  memcpy(&half, from, 2);
  return _cvtsh_ss(half);
#else
  halves h = {0};
  memcpy(&h, from, 2);
  return from_halves(h)[0];
#endif
}
INLINE lanes load_half(const uint8_t *from) {
  lanes r;
#if VECTOR_BYTES == 64
  r.v[0] = (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)from));
#elif VECTOR_BYTES == 32
  EACH r.v[i] = (vec)_mm256_cvtph_ps(_mm_loadu_si128((const void *)(from + 16 * i)));
#else
  EACH { halves h; memcpy(&h, from + 8 * i, 8); r.v[i] = from_halves(h); }
#endif
  return r;
}

// Sixteen bytes, from 0 to 255 or from -128 to 127.
INLINE void store_int8(int8_t *to, ilanes x) {
#if VECTOR_BYTES == 64
  _mm_storeu_si128((void *)to, _mm512_cvtepi32_epi8((__m512i)x.v[0]));
#else
  EACH for (int j = 0; j < PER_VECTOR; ++j) to[i * PER_VECTOR + j] = (int8_t)x.v[i][j];
#endif
}
#if VECTOR_BYTES == 64
INLINE ilanes load_uint8(const uint8_t *from) { return (ilanes){{(ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from))}}; }
INLINE ilanes load_int8(const uint8_t *from) { return (ilanes){{(ivec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from))}}; }
#elif defined(__aarch64__)
INLINE ilanes load_uint8(const uint8_t *from) {
  ilanes r;
  EACH r.v[i] = (ivec)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8((uint32_t)four(from + 4 * i)))));
  return r;
}
INLINE ilanes load_int8(const uint8_t *from) {
  ilanes r;
  EACH r.v[i] = vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8((uint32_t)four(from + 4 * i)))));
  return r;
}
#else
INLINE ilanes load_uint8(const uint8_t *from) { ilanes r; EACH for (int j = 0; j < PER_VECTOR; ++j) r.v[i][j] = from[i * PER_VECTOR + j]; return r; }
INLINE ilanes load_int8(const uint8_t *from) { ilanes r; EACH for (int j = 0; j < PER_VECTOR; ++j) r.v[i][j] = (int8_t)from[i * PER_VECTOR + j]; return r; }
#endif

// Of all lanes: the upper half and the lower one, then of these eight, and so on.
typedef float quad __attribute__((vector_size(16)));
typedef int32_t iquad __attribute__((vector_size(16)));
INLINE quad larger4(quad a, quad b) {
  const iquad is = a < b;
  return (quad)((is & (iquad)b) | (~is & (iquad)a));
}
INLINE float sum16(lanes x) {
  quad q[4];
  memcpy(q, &x, sizeof q);
  const quad s = (q[0] + q[2]) + (q[1] + q[3]);
  return (s[0] + s[2]) + (s[1] + s[3]);
}
INLINE int32_t isum16(ilanes x) {
  iquad q[4];
  memcpy(q, &x, sizeof q);
  const iquad s = (q[0] + q[1]) + (q[2] + q[3]);
  return (s[0] + s[1]) + (s[2] + s[3]);
}
INLINE float largest16(lanes x) {  // no lane is a NaN
  quad q[4];
  memcpy(q, &x, sizeof q);
  const quad s = larger4(larger4(q[0], q[2]), larger4(q[1], q[3]));
  const float a = s[0] < s[2] ? s[2] : s[0], b = s[1] < s[3] ? s[3] : s[1];
  return a < b ? b : a;
}

// Four products of bytes, added to each of 16 sums: `weights` are 16 times four bytes, `x` are four
// bytes for all. No sum overflows, as there are at most 32 products in one.
#if defined(__aarch64__) || (VECTOR_BYTES == 32 && !defined(__AVXVNNI__))
#define SIGNED_WEIGHTS 1  // weights are integers from -128 to 127
#else
#define SIGNED_WEIGHTS 0  // from 0 to 255
#endif

INLINE ivec load_bytes(const uint8_t *from) { ivec x; memcpy(&x, from, VECTOR_BYTES); return x; }

// Of weights from 0 to 63 or so: signed or not is the same to all.
INLINE ivec dot_small(ivec sums, ivec weights, ivec x) {
#if VECTOR_BYTES == 64 && defined(__AVX512VNNI__)
  return (ivec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)x);
#elif VECTOR_BYTES == 64
  __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, (__m512i)x);
  return sums + (ivec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif VECTOR_BYTES == 32 && defined(__AVXVNNI__)
  return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)x);
#elif VECTOR_BYTES == 32
  __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, (__m256i)x);
  return sums + (ivec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
  return (ivec)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, (int8x16_t)x);
#elif defined(__aarch64__)
  int8x16_t w = (int8x16_t)weights, y = (int8x16_t)x;
  int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(y)), high = vmull_s8(vget_high_s8(w), vget_high_s8(y));
  return sums + (ivec)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#elif defined(__SSSE3__)
  __m128i pairs = _mm_maddubs_epi16((__m128i)weights, (__m128i)x);
  return sums + (ivec)_mm_madd_epi16(pairs, _mm_set1_epi16(1));
#else
  const uint8_t *w = (const uint8_t *)&weights;
  const int8_t *y = (const int8_t *)&x;
  for (int j = 0; j < PER_VECTOR; ++j)
    for (int k = 0; k < 4; ++k) sums[j] += w[4 * j + k] * y[4 * j + k];
  return sums;
#endif
}

// Of all bytes, as SIGNED_WEIGHTS says.
INLINE ivec dot_bytes(ivec sums, ivec weights, ivec x) {
#if VECTOR_BYTES == 32 && !defined(__AVXVNNI__)
  // Two products of 127 · 255 do not fit 16 bits; of 127 · 128 they do, and |-128| is 128.
  __m256i w = (__m256i)weights;
  return dot_small(sums, (ivec)_mm256_abs_epi8(w), (ivec)_mm256_sign_epi8((__m256i)x, w));
#elif VECTOR_BYTES == 64 && !defined(__AVX512VNNI__)
  __m512i w = (__m512i)weights, even = _mm512_set1_epi32(0x00ff00ff);
  __m512i low = _mm512_and_si512(w, even), high = _mm512_srli_epi16(w, 8);
  __m512i x_low = _mm512_srai_epi16(_mm512_slli_epi16((__m512i)x, 8), 8), x_high = _mm512_srai_epi16((__m512i)x, 8);
  return sums + (ivec)_mm512_madd_epi16(low, x_low) + (ivec)_mm512_madd_epi16(high, x_high);
#elif VECTOR_BYTES == 16 && defined(__SSE2__)
  const __m128i w = (__m128i)weights, y = (__m128i)x, even = _mm_set1_epi16(0xff);
  const __m128i low = _mm_madd_epi16(_mm_and_si128(w, even), _mm_srai_epi16(_mm_slli_epi16(y, 8), 8));
  return sums + (ivec)low + (ivec)_mm_madd_epi16(_mm_srli_epi16(w, 8), _mm_srai_epi16(y, 8));
#else
  return dot_small(sums, weights, x);
#endif
}

#if VECTOR_BYTES == 64 && defined(__AVX512BF16__)
#define HAS_BF16_DOT 1
#else
#define HAS_BF16_DOT 0
#endif
#if HAS_BF16_DOT && defined(__AMX_BF16__)
#define HAS_AMX 1
#endif

#define PREFETCH(from, ahead) __builtin_prefetch((const char *)(from) + (ahead), 0, 3)
// With 16 registers gcc would keep vectors on the stack: it shares what is read through a pointer for both vectors of
// `lanes`, and does all products before it adds them up. These keep it from that.
#if VECTOR_BYTES == 32
#define AGAIN(from) __asm__("" : "+r"(from))
#define ORDER(sum) __asm__("" : "+x"(sum))
#else
#define AGAIN(from)
#define ORDER(sum)
#endif
