/* Vectors of REAL as wide as the registers of the level compiled for, and the few dense products that KDA is made of.

   Included once by a source that has defined REAL (float or double) and REAL_BITS (32 or 64). Widths are multiples of
   16 elements everywhere, so no product has a tail; every sum runs in one fixed order. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define WIDTH 64
#define ROWS 8 /* rows of a register tile: ROWS x 2 accumulators */
#elif defined(__AVX__)
#define WIDTH 32
#define ROWS 4
#else
#define WIDTH 16
#define ROWS 4
#endif
#define LANES (WIDTH * 8 / REAL_BITS)
#define PANEL (2 * LANES) /* columns that are worked on together */
#define INLINE inline __attribute__((always_inline))

typedef int64_t I;
typedef REAL V __attribute__((vector_size(WIDTH)));
typedef V Loose __attribute__((aligned(4), may_alias)); /* a V anywhere in memory */
#if REAL_BITS == 32
typedef int32_t VI __attribute__((vector_size(WIDTH)));
#else
typedef int64_t VI __attribute__((vector_size(WIDTH)));
#endif

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (VI){__VA_ARGS__})
#endif
/* Lower and upper halves of two vectors, interleaved. */
#if LANES == 16
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#elif LANES == 4
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#else
#define LOW 0, 2
#define HIGH 1, 3
#endif

static INLINE V load(const REAL *p) { return *(const Loose *)p; }
static INLINE void store(REAL *p, V v) { *(Loose *)p = v; }
static INLINE V splat(REAL x) { return (V){0} + x; }
static INLINE V pick(VI mask, V a, V b) { return (V)((mask & (VI)a) | (~mask & (VI)b)); }

/* Ask for memory before it is needed, to be read or written. */
static INLINE void fetch(const REAL *p) { __builtin_prefetch(p, 0, 2); }
static INLINE void fetch_to_write(const REAL *p) { __builtin_prefetch(p, 1, 2); }

static INLINE REAL sum(V v) {
  for (int i = 1; i < LANES; i *= 2) v = SHUFFLE(v, v, LOW) + SHUFFLE(v, v, HIGH);
  return v[0];
}

/* e^x to a unit in the last place; x saturates at +-87 in float. e^0 is exactly 1. */
static INLINE V vexp(V x) {
#if REAL_BITS == 32
  x = pick(x > 87.0f, splat(87.0f), pick(x < -87.0f, splat(-87.0f), x));
  V t = x * 1.44269504088896341f + 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer in the low bits */
  V n = t - 12582912.0f;
  V r = x - n * 0.693359375f + n * 2.12194440e-4f; /* ln 2 in two pieces */
  V p = splat(1.9875691500e-4f);                   /* Cephes' polynomial on [-ln2/2, ln2/2] */
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return p * (V)((((VI)t - 0x4B400000) + 127) << 23);
#else
  for (int i = 0; i < LANES; i++) x[i] = exp(x[i]); /* double is for checking, not for speed */
  return x;
#endif
}
static INLINE V vsigmoid(V x) { return (REAL)1 / ((REAL)1 + vexp(-x)); }

/* Flush denormals to zero in this thread, where the processor can; returns what to hand back to `restore`. Sums below
   1e-38 mean nothing here and cost a hundred times a normal one. */
static inline unsigned flush_denormals(void) {
#if defined(__SSE2__)
  unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before | 0x8040);
  return before;
#else
  return 0;
#endif
}
static inline void restore(unsigned before) {
#if defined(__SSE2__)
  __builtin_ia32_ldmxcsr(before);
#else
  (void)before;
#endif
}

static void *scratch(I reals) { return aligned_alloc(64, (reals * sizeof(REAL) + 63) / 64 * 64); }

/* ------------------------------------------------------------------------------------------------ dense products */

/* out[r][n] = sum over d < depth of x[r][d] * s[d][n], on a tile of RR rows and NN vectors. */
static INLINE void product_tile(const REAL *x, I xs, const REAL *s, I ss, I depth, REAL *out, I os, const int RR,
                                const int NN) {
  V acc[2 * ROWS];
#pragma GCC unroll 16
  for (int i = 0; i < RR * NN; i++) acc[i] = (V){0};
  for (I d = 0; d < depth; d++, s += ss) {
    V w[2];
#pragma GCC unroll 2
    for (int n = 0; n < NN; n++) w[n] = load(s + n * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < RR; r++) {
      REAL a = x[r * xs + d];
#pragma GCC unroll 2
      for (int n = 0; n < NN; n++) acc[r * NN + n] += a * w[n];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < RR; r++)
#pragma GCC unroll 2
    for (int n = 0; n < NN; n++) store(out + r * os + n * LANES, acc[r * NN + n]);
}

/* out [rows][n] = x [rows][depth] . s [depth][n]; rows a multiple of 8, n of LANES. ss leads from a row of s to the
   next, sp from PANEL columns of s to the next PANEL, so that s may be plain (sp = PANEL) or panelled (ss = PANEL). */
static __attribute__((noinline)) void product(const REAL *x, I xs, const REAL *s, I ss, I sp, I depth, REAL *out, I os,
                                              I rows, I n) {
  I j = 0;
  for (; j + PANEL <= n; j += PANEL, s += sp)
    for (I r = 0; r < rows; r += ROWS) product_tile(x + r * xs, xs, s, ss, depth, out + r * os + j, os, ROWS, 2);
  if (j < n)
    for (I r = 0; r < rows; r += ROWS) product_tile(x + r * xs, xs, s, ss, depth, out + r * os + j, os, ROWS, 1);
}

/* out[r][n] = scale * from[r][n] + sum over d < depth of x[d][r] * y[d][n] on ROWS rows and NN vectors of one panel;
   scale belongs to the row or the column. */
static INLINE void update_tile(REAL *out, const REAL *from, const REAL *scale, const REAL *x, I xs, const REAL *y, I ys,
                               I depth, const int by_row, const int NN) {
  V acc[2 * ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int n = 0; n < NN; n++) {
      V s = by_row ? splat(scale[r]) : load(scale + n * LANES);
      acc[r * NN + n] = s * load(from + r * PANEL + n * LANES);
    }
  for (I d = 0; d < depth; d++, x += xs, y += ys) {
    V w[2];
#pragma GCC unroll 2
    for (int n = 0; n < NN; n++) w[n] = load(y + n * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      REAL a = x[r];
#pragma GCC unroll 2
      for (int n = 0; n < NN; n++) acc[r * NN + n] += a * w[n];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int n = 0; n < NN; n++) store(out + r * PANEL + n * LANES, acc[r * NN + n]);
}

/* One panel: out [rows][PANEL] = scale o from + x^T [rows][depth] . y [depth][wide], wide PANEL or LANES; `from` may be
   `out`. `update` scales rows, `update_columns` columns. */
static INLINE void update_any(REAL *out, const REAL *from, const REAL *scale, const REAL *x, I xs, const REAL *y, I ys,
                              I depth, I rows, I wide, const int by_row) {
  if (wide == PANEL)
    for (I r = 0; r < rows; r += ROWS)
      update_tile(out + r * PANEL, from + r * PANEL, scale + (by_row ? r : 0), x + r, xs, y, ys, depth, by_row, 2);
  else
    for (I r = 0; r < rows; r += ROWS)
      update_tile(out + r * PANEL, from + r * PANEL, scale + (by_row ? r : 0), x + r, xs, y, ys, depth, by_row, 1);
}
static __attribute__((noinline)) void update(REAL *out, const REAL *from, const REAL *scale, const REAL *x, I xs,
                                             const REAL *y, I ys, I depth, I rows, I wide) {
  update_any(out, from, scale, x, xs, y, ys, depth, rows, wide, 1);
}
static __attribute__((noinline)) void update_columns(REAL *out, const REAL *from, const REAL *scale, const REAL *x,
                                                     I xs, const REAL *y, I ys, I depth, I rows, I wide) {
  update_any(out, from, scale, x, xs, y, ys, depth, rows, wide, 0);
}

/* A panelled matrix [rows][n] lies as [panels][rows][PANEL], the last panel perhaps half used: a panel is then one
   piece of memory, where rows of 512 bytes would fall into the same few sets of the nearest cache. */
static INLINE I panelled(I rows, I n) { return rows * ((n + PANEL - 1) / PANEL * PANEL); }
static INLINE I width_at(I j, I n) { return n - j < PANEL ? LANES : PANEL; }

static void pack(const REAL *x, REAL *out, I rows, I n) {
  for (I j = 0; j < n; j += PANEL)
    for (I r = 0; r < rows; r++, out += PANEL) memcpy(out, x + r * n + j, width_at(j, n) * sizeof(REAL));
}
static void unpack(const REAL *x, REAL *out, I rows, I n) {
  for (I j = 0; j < n; j += PANEL)
    for (I r = 0; r < rows; r++, x += PANEL) memcpy(out + r * n + j, x, width_at(j, n) * sizeof(REAL));
}

/* out [columns][rows] = x [rows][columns]^T; both multiples of LANES. LANES x LANES tiles in registers: interleaving
   row i with row i + LANES/2 rotates the bits of (row, column) by one; log2(LANES) rotations swap them. */
static inline void transpose(const REAL *x, I xs, REAL *out, I os, I rows, I columns) {
  for (I r = 0; r < rows; r += LANES)
    for (I c = 0; c < columns; c += LANES) {
      V a[LANES], b[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) a[i] = load(x + (r + i) * xs + c);
#pragma GCC unroll 4
      for (int step = 1; step < LANES; step *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
          b[2 * i] = SHUFFLE(a[i], a[i + LANES / 2], LOW);
          b[2 * i + 1] = SHUFFLE(a[i], a[i + LANES / 2], HIGH);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) a[i] = b[i];
      }
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) store(out + (c + i) * os + r, a[i]);
    }
}

/* One panel x [rows][PANEL] of a panelled matrix, `wide` columns from column j of n on, into the panelled transpose
   out [n][rows]. */
static void transpose_panel(const REAL *x, REAL *out, I rows, I j, I wide, I n) {
  for (I r = 0; r < rows; r += PANEL)
    transpose(x + r * PANEL, PANEL, out + r * n + j * PANEL, PANEL, width_at(r, rows), wide);
}
