/* Vectors of 16 floats and the few operations on them that decoding needs. GCC vector extensions: every processor gets
   the widest registers its build allows, and the same sums in the same order. */

#ifndef NONET_VECTOR_H
#define NONET_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t I;
typedef float V __attribute__((vector_size(64), aligned(4)));
typedef int32_t VI __attribute__((vector_size(64), aligned(4)));
enum { LANES = 16 };

/* ------------------------------------------------------------- elementwise */

static inline V load(const float *p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
static inline void store(float *p, V v) { memcpy(p, &v, sizeof v); }
static inline V splat(float x) { return (V){0} + x; }
static inline V pick(VI mask, V a, V b) { return (V)((mask & (VI)a) | (~mask & (VI)b)); }
/* One vector out of two, half as many sums of twice as many lanes: lane i of the result adds lane i of a or b, as KEEP
   says, and the lane of the same vector that lies 8, 4, 2 or 1 beside it. Folding by 8, 4, 2, 1 sums 16 vectors into
   one, lane i holding the sum of vector i; `sum` adds the lanes of one vector in the same order. Taking one of the two
   where it lies is a blend, which costs less than a shuffle. */
#define FOLD(a, b, KEEP, OTHER) (__builtin_shuffle(a, b, (VI)KEEP) + __builtin_shuffle(a, b, (VI)OTHER))
#define KEEP8 {0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31}
#define OTHER8 {8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23}
#define KEEP4 {0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31}
#define OTHER4 {4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27}
#define KEEP2 {0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31}
#define OTHER2 {2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29}
#define KEEP1 {0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31}
#define OTHER1 {1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30}
static inline __attribute__((always_inline)) V sums(V *v) {
  for (int i = 0; i < 8; i++) v[i] = FOLD(v[i], v[i + 8], KEEP8, OTHER8);
  for (int i = 0; i < 4; i++) v[i] = FOLD(v[i], v[i + 4], KEEP4, OTHER4);
  for (int i = 0; i < 2; i++) v[i] = FOLD(v[i], v[i + 2], KEEP2, OTHER2);
  return FOLD(v[0], v[1], KEEP1, OTHER1);
}
static inline float sum(V v) {
  v = FOLD(v, v, KEEP8, OTHER8);
  v = FOLD(v, v, KEEP4, OTHER4);
  v = FOLD(v, v, KEEP2, OTHER2);
  v = FOLD(v, v, KEEP1, OTHER1);
  return v[0];
}

/* e^x to about one unit in the last place: 2^n times a polynomial on [-ln2/2, ln2/2]; saturates outside +-87. */
static inline V vexp(V x) {
  x = pick(x > 87.0f, splat(87.0f), pick(x < -87.0f, splat(-87.0f), x));
  V t = x * 1.44269504088896341f + 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer in the low bits */
  V n = t - 12582912.0f;
  V r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  V p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  VI scale = (((VI)t - 0x4B400000) + 127) << 23;
  return p * (V)scale;
}
static inline V vsigmoid(V x) { return 1.0f / (1.0f + vexp(-x)); }
/* tanh through e^2x; near zero, where that cancels, its series. */
static inline V vtanh(V x) {
  V s = x * x;
  V series = x * (1.0f + s * (-0.33333333f + s * (0.13333333f + s * -0.05396825f)));
  V big = 1.0f - 2.0f / (1.0f + vexp(2.0f * x));
  return pick(s < 0.01f, series, big);
}
/* log(1 + e^x) = max(x, 0) + log(1 + u), u = e^-|x|; log(1 + u) = 2 artanh(z), z = u / (2 + u) <= 1/3, its series. */
static inline V vsoftplus(V x) {
  V u = vexp(pick(x > 0.0f, -x, x)), z = u / (2.0f + u), s = z * z;
  V p = splat(1.0f / 13);
  p = p * s + 1.0f / 11;
  p = p * s + 1.0f / 9;
  p = p * s + 1.0f / 7;
  p = p * s + 1.0f / 5;
  p = p * s + 1.0f / 3;
  p = p * s + 1.0f;
  return pick(x > 0.0f, x, splat(0)) + 2.0f * z * p;
}
/* Elements i.. of p[n] as a vector, zeros behind the end; and back. */
static inline V at(const float *p, I i, I n) {
  if (i + LANES <= n) return load(p + i);
  V v = {0};
  for (I j = i; j < n; j++) v[j - i] = p[j];
  return v;
}
static inline void put(float *p, I i, I n, V v) {
  if (i + LANES <= n) store(p + i, v);
  else
    for (I j = i; j < n; j++) p[j] = v[j - i];
}
/* out[i] = f(e = in[i]); the tail goes through one padded vector so that every element takes the same road. */
#define MAP(n, in, out, expression)                                                                                    \
  for (I i_ = 0, n_ = (n); i_ < n_; i_ += LANES) {                                                                     \
    V e = at(in, i_, n_);                                                                                              \
    put(out, i_, n_, expression);                                                                                      \
  }
static inline float dot(const float *a, const float *b, I n) {
  V s = {0};
  for (I i = 0; i < n; i += LANES) s += at(a, i, n) * at(b, i, n);
  return sum(s);
}

static void rmsnorm(const float *x, const float *w, float *y, I n, float eps) {
  float r = 1.0f / sqrtf(dot(x, x, n) / n + eps);
  for (I i = 0; i < n; i++) y[i] = x[i] * r * w[i];
}

#endif
