/* One decode step of a whole model for B rows, in float32: the native twin of Model.forward with one token per row.

   Rows never meet, so each thread carries a block of rows through every layer without waiting for the others. Weights
   are read where torch keeps them; nothing is packed, so nothing can be stale. Every dot product is summed in one fixed
   order, whatever the block: a row's result does not depend on its batch-mates.

   Layouts are those of model/state.py; formulas those of model/attention.py, kda.py and ffn.py. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t I;
typedef float V __attribute__((vector_size(64), aligned(4)));
typedef int32_t VI __attribute__((vector_size(64), aligned(4)));
enum { LANES = 16, BLOCK = 16, GQA = 0, KDA = 1, MLA = 2 };

typedef struct {
  I kind;
  const float *ln1, *ln2, *gate, *up, *down, *gate_b, *up_b, *down_b;         /* norms and feed-forward */
  const float *q, *k, *v, *o, *q_b, *k_b, *v_b, *o_b, *q_norm, *k_norm;       /* gqa; kda uses q, k, v, o */
  const float *g, *f_a, *f_b, *beta, *decay, *dt, *q_conv, *k_conv, *v_conv, *o_norm; /* kda; mla uses g, o */
  const float *q_a, *q_a_norm, *q_bb, *kv_a, *kv_a_norm, *kv_b;               /* mla */
  float *cache, *cache2; /* gqa: k, v; kda: matrix, tail; mla: latent, - */
} Layer;

typedef struct {
  I layers, D, F, situ, W, H;
  I G, K;                          /* gqa: key heads, head width */
  I KK, kernel, rank;              /* kda: head width, convolution taps, decay rank */
  I q_rank, R, nope, extra, VD;    /* mla: query rank, latent rank, key parts, value width */
  float eps, b1, b2, lower;
  const float *norm, *head;
} Model;

/* ------------------------------------------------------------- elementwise */

static inline V load(const float *p) { V v; memcpy(&v, p, sizeof v); return v; }
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
#define MAP(n, in, out, expression)              \
  for (I i_ = 0, n_ = (n); i_ < n_; i_ += LANES) { \
    V e = at(in, i_, n_);                        \
    put(out, i_, n_, expression);                \
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

/* Ask for p[n] ahead of its use: caches are long, and read once a step, so a step waits for memory more than it counts. */
static inline void fetch(const float *p, I n) {
  for (I i = 0; i < n; i += LANES) __builtin_prefetch(p + i, 0, 2);
}

/* out = share * sum over l < L of w[l] values[l], even and odd positions apart, so that no sum waits for the last. */
static void mix(const float *w, const float *values, I vs, I vn, float *out, I L, float share, const float *next, I ks) {
  I i = 0;
  for (; i + 2 * LANES <= vn; i += 2 * LANES) {
    V a = {0}, b = {0}, c = {0}, d = {0};
    const float *v = values + i;
    I l = 0;
    for (; l + 2 <= L; l += 2, v += 2 * vs) {
      if (i == 0) fetch(next + l * ks, 2 * ks);
      a += w[l] * load(v);
      b += w[l] * load(v + LANES);
      c += w[l + 1] * load(v + vs);
      d += w[l + 1] * load(v + vs + LANES);
    }
    if (l < L) {
      a += w[l] * load(v);
      b += w[l] * load(v + LANES);
    }
    store(out + i, (a + c) * share);
    store(out + i + LANES, (b + d) * share);
  }
  for (; i < vn; i += LANES) {
    V a = {0};
    for (I l = 0; l < L; l++) a += w[l] * at(values + l * vs, i, vn);
    put(out, i, vn, a * share);
  }
}

/* softmax(scale * q keys^T) values over L positions; keys and values are rows of width ks and vs, `next` the keys of
   the call to come. */
static void attend(const float *q, const float *keys, I ks, I kn, const float *values, I vs, I vn, float *out, I L,
                   float scale, float *w, const float *next) {
  V top = splat(-INFINITY), total = {0};
  for (I l = 0; l < L; l += LANES) {
    I n = L - l < LANES ? L - l : LANES;
    fetch(values + l * vs, n * vs);
    matvec(q, keys + l * ks, ks, w + l, n, kn);
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
  mix(w, values, vs, vn, out, L, 1.0f / sum(total), next, ks);
}

/* ------------------------------------------------------------------ mixers: out[rows][D] from h[rows][D] */

static void rotate(float *x, const float *cos, const float *sin, I K) {
  for (I i = 0; i < K / 2; i++) {
    float a = x[i], b = x[i + K / 2];
    x[i] = a * cos[i] + b * sin[i];
    x[i + K / 2] = b * cos[i + K / 2] + a * sin[i + K / 2];
  }
}

static void gqa(const Model *m, const Layer *l, const float *h, I rows, I first, const I *lengths, I cap,
                const float *cos, const float *sin, float *out, float *s) {
  I H = m->H, G = m->G, K = m->K, D = m->D;
  float *q = s, *k = q + rows * H * K, *v = k + rows * G * K, *o = v + rows * G * K, *w = o + rows * H * K;
  linear(h, D, l->q, l->q_b, q, H * K, rows, H * K, D);
  linear(h, D, l->k, l->k_b, k, G * K, rows, G * K, D);
  linear(h, D, l->v, l->v_b, v, G * K, rows, G * K, D);
  for (I r = 0; r < rows; r++) {
    I b = first + r, L = lengths[b];
    for (I j = 0; j < H + G; j++) {
      float *x = j < H ? q + (r * H + j) * K : k + (r * G + j - H) * K;
      const float *norm = j < H ? l->q_norm : l->k_norm;
      if (norm) rmsnorm(x, norm, x, K, m->eps);
      if (cos) rotate(x, cos + b * K, sin + b * K, K);
    }
    for (I g = 0; g < G; g++) {
      float *kc = l->cache + (b * G + g) * cap * K, *vc = l->cache2 + (b * G + g) * cap * K;
      memcpy(kc + L * K, k + (r * G + g) * K, K * sizeof(float));
      memcpy(vc + L * K, v + (r * G + g) * K, K * sizeof(float));
      for (I j = g * (H / G); j < (g + 1) * (H / G); j++)
        attend(q + (r * H + j) * K, kc, K, K, vc, K, K, o + (r * H + j) * K, L + 1, 1.0f / sqrtf(K), w, kc + cap * K);
    }
  }
  linear(o, H * K, l->o, l->o_b, out, D, rows, D, H * K);
}

/* Convolve one channel group with its remembered inputs, apply SiLU, shift the memory. tail: [kernel-1][stride]. */
static void convolve(float *x, const float *taps, float *tail, I stride, I width, I kernel) {
  for (I c = 0; c < width; c++) {
    float y = x[c] * taps[c * kernel + kernel - 1];
    for (I j = 0; j < kernel - 1; j++) y += tail[j * stride + c] * taps[c * kernel + j];
    for (I j = 0; j < kernel - 2; j++) tail[j * stride + c] = tail[(j + 1) * stride + c];
    tail[(kernel - 2) * stride + c] = x[c];
    x[c] = y;
  }
  MAP(width, x, x, e * vsigmoid(e));
}

static void kda_head(const float *q, const float *k, const float *v, const float *g, float beta, float *S, float *o, I K) {
  float a[K], read[K];
  MAP(K, g, a, vexp(e));
  memset(read, 0, sizeof read);
  for (I i = 0; i < K; i++)
    for (I j = 0; j < K; j++) {
      S[i * K + j] *= a[i];
      read[j] += k[i] * S[i * K + j];
    }
  memset(o, 0, K * sizeof(float));
  for (I j = 0; j < K; j++) read[j] = (v[j] - read[j]) * beta;
  for (I i = 0; i < K; i++)
    for (I j = 0; j < K; j++) {
      S[i * K + j] += k[i] * read[j];
      o[j] += q[i] * S[i * K + j];
    }
}

static void l2_normalise(float *x, I K, float scale) {
  float r = scale / sqrtf(dot(x, x, K) + 1e-6f);
  for (I i = 0; i < K; i++) x[i] *= r;
}

static void kda(const Model *m, const Layer *l, const float *h, I rows, I first, float *out, float *s) {
  I H = m->H, K = m->KK, C = H * K, D = m->D, past = m->kernel - 1;
  float *q = s, *k = q + rows * C, *v = k + rows * C, *g = v + rows * C, *o = g + rows * C, *gate = o + rows * C;
  float *low = gate + rows * C, *beta = low + rows * m->rank;
  linear(h, D, l->q, 0, q, C, rows, C, D);
  linear(h, D, l->k, 0, k, C, rows, C, D);
  linear(h, D, l->v, 0, v, C, rows, C, D);
  linear(h, D, l->g, 0, gate, C, rows, C, D);
  linear(h, D, l->f_a, 0, low, m->rank, rows, m->rank, D);
  linear(low, m->rank, l->f_b, 0, g, C, rows, C, m->rank);
  linear(h, D, l->beta, 0, beta, H, rows, H, D);
  MAP(rows * H, beta, beta, vsigmoid(e));
  for (I r = 0; r < rows; r++) {
    I b = first + r;
    float *tail = l->cache2 + b * past * 3 * C, *gr = g + r * C;
    convolve(q + r * C, l->q_conv, tail, 3 * C, C, m->kernel);
    convolve(k + r * C, l->k_conv, tail + C, 3 * C, C, m->kernel);
    convolve(v + r * C, l->v_conv, tail + 2 * C, 3 * C, C, m->kernel);
    for (I c = 0; c < C; c++) gr[c] = (gr[c] + l->dt[c]) * l->decay[c / K];
    MAP(C, gr, gr, m->lower * vsigmoid(e));
    for (I j = 0; j < H; j++) {
      I i = r * C + j * K;
      l2_normalise(q + i, K, 1.0f / sqrtf(K));
      l2_normalise(k + i, K, 1.0f);
      kda_head(q + i, k + i, v + i, g + i, beta[r * H + j], l->cache + (b * H + j) * K * K, o + i, K);
      rmsnorm(o + i, l->o_norm, o + i, K, m->eps);
    }
  }
  MAP(rows * C, gate, gate, vsigmoid(e) * load(o + i_));
  linear(gate, C, l->o, 0, out, D, rows, D, C);
}

static void mla(const Model *m, const Layer *l, const float *h, I rows, I first, const I *lengths, I cap, float *out,
                float *s) {
  I H = m->H, R = m->R, E = m->extra, N = m->nope, VD = m->VD, D = m->D, T = R + E;
  float *low = s, *q = low + rows * m->q_rank, *kv = q + rows * H * (N + E), *gate = kv + rows * T;
  float *o = gate + rows * H * VD, *query = o + rows * H * VD + LANES, *mixed = query + T, *w = mixed + R + LANES;
  linear(h, D, l->q_a, 0, low, m->q_rank, rows, m->q_rank, D);
  for (I r = 0; r < rows; r++) rmsnorm(low + r * m->q_rank, l->q_a_norm, low + r * m->q_rank, m->q_rank, m->eps);
  linear(low, m->q_rank, l->q_bb, 0, q, H * (N + E), rows, H * (N + E), m->q_rank);
  linear(h, D, l->kv_a, 0, kv, T, rows, T, D);
  linear(h, D, l->g, 0, gate, H * VD, rows, H * VD, D);
  for (I r = 0; r < rows; r++) {
    I b = first + r, L = lengths[b];
    float *cache = l->cache + b * cap * T;
    rmsnorm(kv + r * T, l->kv_a_norm, kv + r * T, R, m->eps);
    memcpy(cache + L * T, kv + r * T, T * sizeof(float));
    for (I j = 0; j < H; j++) {
      const float *qj = q + (r * H + j) * (N + E), *wk = l->kv_b + j * (N + VD) * R, *wv = wk + N * R;
      memset(query, 0, R * sizeof(float));
      for (I n = 0; n < N; n++)
        for (I i = 0; i < R; i++) query[i] += qj[n] * wk[n * R + i];
      memcpy(query + R, qj + N, E * sizeof(float));
      attend(query, cache, T, T, cache, T, R, mixed, L + 1, 1.0f / sqrtf(N + E), w, cache);
      matvec(mixed, wv, R, o + (r * H + j) * VD, VD, R);
    }
  }
  MAP(rows * H * VD, gate, gate, vsigmoid(e) * load(o + i_));
  linear(gate, H * VD, l->o, 0, out, D, rows, D, H * VD);
}

/* -------------------------------------------------------------------- step */

static void feed_forward(const Model *m, const Layer *l, const float *h, I rows, float *out, float *s) {
  I F = m->F, D = m->D;
  float *gate = s, *up = gate + rows * F + LANES;
  linear(h, D, l->gate, l->gate_b, gate, F, rows, F, D);
  linear(h, D, l->up, l->up_b, up, F, rows, F, D);
  if (m->situ) {
    MAP(rows * F, gate, gate, m->b1 * vtanh(e / m->b1) * vsigmoid(e) * m->b2 * vtanh(load(up + i_) / m->b2));
  } else {
    MAP(rows * F, gate, gate, e * vsigmoid(e) * load(up + i_));
  }
  linear(gate, F, l->down, l->down_b, out, D, rows, D, F);
}

static void block(const Model *m, const Layer *layers, float *x, I rows, I first, const I *lengths, I cap,
                  const float *cos, const float *sin, float *logits, float *scratch) {
  I D = m->D;
  float *h = scratch, *y = h + BLOCK * D, *s = y + BLOCK * D;
  for (I i = 0; i < m->layers; i++) {
    const Layer *l = layers + i;
    for (I r = 0; r < rows; r++) rmsnorm(x + r * D, l->ln1, h + r * D, D, m->eps);
    if (l->kind == GQA) gqa(m, l, h, rows, first, lengths, cap, cos, sin, y, s);
    if (l->kind == KDA) kda(m, l, h, rows, first, y, s);
    if (l->kind == MLA) mla(m, l, h, rows, first, lengths, cap, y, s);
    for (I j = 0; j < rows * D; j++) x[j] += y[j];
    for (I r = 0; r < rows; r++) rmsnorm(x + r * D, l->ln2, h + r * D, D, m->eps);
    feed_forward(m, l, h, rows, y, s);
    for (I j = 0; j < rows * D; j++) x[j] += y[j];
  }
  for (I r = 0; r < rows; r++) rmsnorm(x + r * D, m->norm, h + r * D, D, m->eps);
  linear(h, D, m->head, 0, logits + first * m->W, m->W, rows, m->W, D);
}

/* x [B][D]: embeddings, overwritten. lengths [B]: positions already cached. cos, signed sin [B][K] or null. scratch_floats: per
   thread, of which there are at most `threads`. Returns 0, or 1 when memory ran out. */
int decode_step(const Model *m, const Layer *layers, float *x, const I *lengths, I B, I cap, const float *cos,
                const float *sin, float *logits, I scratch_floats, I threads) {
  int failed = 0;
  I blocks = (B + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(threads < blocks ? threads : blocks)
  {
    float *scratch = aligned_alloc(64, (scratch_floats * sizeof(float) + 63) / 64 * 64);
    if (!scratch) failed = 1;
#pragma omp for schedule(dynamic)
    for (I first = 0; first < B; first += BLOCK)
      if (scratch)
        block(m, layers, x + first * m->D, B - first < BLOCK ? B - first : BLOCK, first, lengths, cap, cos, sin, logits,
              scratch);
    free(scratch);
  }
  return failed;
}
