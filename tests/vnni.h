// AVX-VNNI for a CPU that has only AVX2: what its instruction is defined to do. Each lane gains four products of bytes,
// without saturation.
#include <immintrin.h>
#define __AVXVNNI__ 1
static inline __m256i vpdpbusd(__m256i sums, __m256i weights, __m256i x) {
  int lane[8];
  unsigned char u[32];
  signed char s[32];
  _mm256_storeu_si256((__m256i *)lane, sums);
  _mm256_storeu_si256((__m256i *)u, weights);
  _mm256_storeu_si256((__m256i *)s, x);
  for (int i = 0; i < 32; ++i) lane[i / 4] += u[i] * s[i];
  return _mm256_loadu_si256((const __m256i *)lane);
}
#define _mm256_dpbusd_avx_epi32 vpdpbusd
