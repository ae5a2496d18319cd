/* Vectors of 16 floats and the few operations on them that decoding needs. GCC vector extensions: every processor gets
   the widest registers its build allows, and the same sums in the same order.

   Every dot product is summed in one fixed order, whatever block of rows it is computed in: a row's result does not
   depend on its batch-mates. */

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
/* a + b folded: lane i of the result adds lanes that a later fold brings together. Folding 8, 4, 2, 1 sums 16 vectors
   into one, lane i holding the sum of vector i; `sum` does the same for one vector, in the same order. */
#define FOLD(a, b, LOW, HIGH) (__builtin_shuffle(a, b, (VI)LOW) + __builtin_shuffle(a, b, (VI)HIGH))
#define LOW8 {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}
#define HIGH8 {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31}
#define LOW4 {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}
#define HIGH4 {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31}
#define LOW2 {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29}
#define HIGH2 {2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31}
#define LOW1 {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}
#define HIGH1 {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31}
static inline __attribute__((always_inline)) V sums(V *v) {
  for (int i = 0; i < 8; i++) v[i] = FOLD(v[2 * i], v[2 * i + 1], LOW8, HIGH8);
  for (int i = 0; i < 4; i++) v[i] = FOLD(v[2 * i], v[2 * i + 1], LOW4, HIGH4);
  for (int i = 0; i < 2; i++) v[i] = FOLD(v[2 * i], v[2 * i + 1], LOW2, HIGH2);
  return FOLD(v[0], v[1], LOW1, HIGH1);
}
static inline float sum(V v) {
  v = FOLD(v, v, LOW8, HIGH8);
  v = FOLD(v, v, LOW4, HIGH4);
  v = FOLD(v, v, LOW2, HIGH2);
  v = FOLD(v, v, LOW1, HIGH1);
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

/* ---------------------------------------------------------------- products */

/* acc[r * NN + n] = x[r] . w[n] over K, as vectors still to be summed, on an RR x NN tile. */
static inline __attribute__((always_inline)) void tile(const float *x, I xs, const float *w, I ws, I K, V *acc,
                                                       const int RR, const int NN) {
#pragma GCC unroll 16
  for (int i = 0; i < RR * NN; i++) acc[i] = (V){0};
  I k = 0;
  for (; k + LANES <= K; k += LANES)
#pragma GCC unroll 4
    for (int r = 0; r < RR; r++) {
      V xv = load(x + r * xs + k);
      const float *p = w + k;
#pragma GCC unroll 16
      for (int n = 0; n < NN; n++, p += ws) acc[r * NN + n] += xv * load(p);
    }
  if (k < K)
    for (int r = 0; r < RR; r++)
      for (int n = 0; n < NN; n++) acc[r * NN + n] += at(x + r * xs, k, K) * at(w + n * ws, k, K);
}

/* y[n] = x . w[n] for N rows of w */
static void matvec(const float *x, const float *w, I ws, float *y, I N, I K) {
  V acc[16];
  I n = 0;
  for (; n + 16 <= N; n += 16) {
    tile(x, 0, w + n * ws, ws, K, acc, 1, 16);
    store(y + n, sums(acc));
  }
  for (; n < N; n++) {
    tile(x, 0, w + n * ws, ws, K, acc, 1, 1);
    y[n] = sum(acc[0]);
  }
}

/* y[r][n] = b[n] + x[r] . w[n] */
static void linear(const float *x, I xs, const float *w, const float *b, float *y, I ys, I rows, I N, I K) {
  I whole = rows / 4 * 4, n = 0;
  V acc[16];
  float out[16];
  for (; n + 4 <= N; n += 4)
    for (I r = 0; r < whole; r += 4) {
      tile(x + r * xs, xs, w + n * K, K, K, acc, 4, 4);
      store(out, sums(acc));
      for (int i = 0; i < 4; i++) memcpy(y + (r + i) * ys + n, out + 4 * i, 4 * sizeof(float));
    }
  for (I r = 0; r < whole; r++) matvec(x + r * xs, w + n * K, K, y + r * ys + n, N - n, K);
  for (I r = whole; r < rows; r++) matvec(x + r * xs, w, K, y + r * ys, N, K);
  if (b)
    for (I r = 0; r < rows; r++)
      for (n = 0; n < N; n++) y[r * ys + n] += b[n];
}

static void rmsnorm(const float *x, const float *w, float *y, I n, float eps) {
  float r = 1.0f / sqrtf(dot(x, x, n) / n + eps);
  for (I i = 0; i < n; i++) y[i] = x[i] * r * w[i];
}

/* Ask for p[n] ahead of its use: caches are long, and read once a step, so a step waits for memory more than it counts.
 */
static inline void fetch(const float *p, I n) {
  for (I i = 0; i < n; i += LANES) __builtin_prefetch(p + i, 0, 2);
}

/* Rows of floats, PAGE of them in a page: row l is row l % PAGE of page table[l / PAGE], `row` floats apart in it. */
enum { PAGE = LANES };
typedef struct {
  const float *pool;
  const I *table;
  I page, row;
} Paged;
static inline const float *from(Paged p, I l) { return p.pool + p.table[l / PAGE] * p.page + l % PAGE * p.row; }

/* sums[0..3] += w[l] values[l] over one page's n positions: 32 columns, even and odd positions apart, so that no sum
   waits for the last; asks for `ahead` on the way. */
static inline __attribute__((always_inline)) void mix_page(const float *w, const float *v, I vs, I n, V *sums,
                                                           const float *ahead, I ks) {
  I l = 0;
#pragma GCC unroll 8
  for (; l + 2 <= n; l += 2, v += 2 * vs) {
    if (ahead) fetch(ahead + l * ks, 2 * ks);
    sums[0] += w[l] * load(v);
    sums[1] += w[l] * load(v + LANES);
    sums[2] += w[l + 1] * load(v + vs);
    sums[3] += w[l + 1] * load(v + vs + LANES);
  }
  if (l < n) {
    sums[0] += w[l] * load(v);
    sums[1] += w[l] * load(v + LANES);
  }
}

/* out = share * sum over l < L of w[l] values[l] */
static void mix(const float *w, Paged values, I vn, float *out, I L, float share, Paged next) {
  I i = 0, whole = L / PAGE * PAGE;
  for (; i + 2 * LANES <= vn; i += 2 * LANES) {
    V sums[4] = {0};
    for (I l = 0; l < whole; l += PAGE)
      mix_page(w + l, from(values, l) + i, values.row, PAGE, sums, i ? 0 : from(next, l), next.row);
    if (whole < L)
      mix_page(w + whole, from(values, whole) + i, values.row, L - whole, sums, i ? 0 : from(next, whole), next.row);
    store(out + i, (sums[0] + sums[2]) * share);
    store(out + i + LANES, (sums[1] + sums[3]) * share);
  }
  for (; i < vn; i += LANES) {
    V a = {0};
    for (I l = 0; l < L; l++) a += w[l] * at(from(values, l) + i, 0, vn - i);
    put(out, i, vn, a * share);
  }
}

/* softmax(scale * q keys^T) values over L positions, kn and vn wide; `next`: the keys of the call to come. Pages are
   taken in order, so which ones they are does not show in the result. */
static void attend(const float *q, Paged keys, I kn, Paged values, I vn, float *out, I L, float scale, float *w,
                   Paged next) {
  V top = splat(-INFINITY), total = {0};
  for (I l = 0; l < L; l += PAGE) {
    I n = L - l < PAGE ? L - l : PAGE;
    fetch(from(values, l), n * values.row);
    matvec(q, from(keys, l), keys.row, w + l, n, kn);
  }
  for (I l = L; l % LANES; l++) w[l] = -INFINITY;
  for (I l = 0; l < L; l += LANES) {
    V e = load(w + l) * scale;
    store(w + l, e);
    top = pick(e > top, e, top);
  }
  for (int i = 1; i < LANES; i++) top[0] = top[i] > top[0] ? top[i] : top[0];
  for (I l = 0; l < L; l += LANES) {
    V e = load(w + l);
    e = pick(e > -INFINITY, vexp(e - top[0]), splat(0));
    store(w + l, e);
    total += e;
  }
  mix(w, values, vn, out, L, 1.0f / sum(total), next);
}

#endif
