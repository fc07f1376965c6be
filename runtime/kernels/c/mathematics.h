// Functions of sixteen numbers. They are written here because those of a C library differ between machines.

#pragma once

#include "lanes.h"

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

// erf(x) as a quotient of polynomials.
INLINE lanes erf16(lanes x) {
  x = pick(less(x, all(-4)), all(-4), x);
  x = pick(less(all(4), x), all(4), x);
  const lanes z = mul(x, x);
  static const float P[] = {-2.72614225801306e-10f, 2.77068142495902e-08f, -2.10102402082508e-06f, -5.69250639462346e-05f,
                            -7.34990630326855e-04f, -2.95459980854025e-03f, -1.60960333262415e-02f};
  static const float Q[] = {-1.45660718464996e-05f, -2.13374055278905e-04f, -1.68282697438203e-03f, -7.37332916720468e-03f,
                            -1.42647390514189e-02f};
  lanes p = all(P[0]), q = all(Q[0]);
  _Pragma("GCC unroll 6") for (int i = 1; i < 7; ++i) p = fma16(p, z, all(P[i]));
  _Pragma("GCC unroll 4") for (int i = 1; i < 5; ++i) q = fma16(q, z, all(Q[i]));
  return over(mul(x, p), q);
}
