/* One position for B sequences, the state changed in place. Reading S with q in the pass that reads it with k leaves
   one more pass, which writes: S <- a o S + k d^T with d = beta (v - S^T (a o k)), and o = S^T (a o q) + (q . k) d. */

typedef struct {
  const REAL *q, *k, *v, *g, *beta;
  I q_b, q_h, k_b, k_h, v_b, v_h, g_b, g_h, beta_b, beta_h;
  REAL *S, *o; /* [B][H][K][V], [B][H][V] */
  I B, H, K, V, threads;
} Step;

#if WIDTH == 64
#define BAND 8 /* vectors of columns at a time: two accumulators each */
#else
#define BAND 4
#endif

/* NN vectors of columns. a: decay; ka, qa: a o k, a o q; qk: q . k. */
static INLINE void step_band(REAL *S, I n, I K, const REAL *a, const REAL *ka, const REAL *qa, const REAL *k, REAL qk,
                              REAL beta, const REAL *v, REAL *o, const int NN) {
  V read[BAND], out[BAND];
#pragma GCC unroll 8
  for (int j = 0; j < NN; j++) read[j] = out[j] = (V){0};
  for (I i = 0; i < K; i++)
#pragma GCC unroll 8
    for (int j = 0; j < NN; j++) {
      V s = load(S + i * n + j * LANES);
      read[j] += ka[i] * s;
      out[j] += qa[i] * s;
    }
#pragma GCC unroll 8
  for (int j = 0; j < NN; j++) {
    read[j] = beta * (load(v + j * LANES) - read[j]);
    store(o + j * LANES, out[j] + qk * read[j]);
  }
  for (I i = 0; i < K; i++)
#pragma GCC unroll 8
    for (int j = 0; j < NN; j++) store(S + i * n + j * LANES, a[i] * load(S + i * n + j * LANES) + k[i] * read[j]);
}

static void step_head(const Step *f, I b, I h) {
  const I K = f->K, n = f->V;
  const REAL *q = f->q + b * f->q_b + h * f->q_h, *k = f->k + b * f->k_b + h * f->k_h;
  const REAL *v = f->v + b * f->v_b + h * f->v_h, *g = f->g + b * f->g_b + h * f->g_h;
  REAL *S = f->S + (b * f->H + h) * K * n, *o = f->o + (b * f->H + h) * n, a[256], ka[256], qa[256];
  const REAL beta = f->beta[b * f->beta_b + h * f->beta_h];
  V qk = {0};
  for (I i = 0; i < K; i += LANES) {
    V e = vexp(load(g + i)), x = load(k + i), y = load(q + i);
    store(a + i, e);
    store(ka + i, e * x);
    store(qa + i, e * y);
    qk += x * y;
  }
  I j = 0;
  for (; j + BAND * LANES <= n; j += BAND * LANES)
    step_band(S + j, n, K, a, ka, qa, k, sum(qk), beta, v + j, o + j, BAND);
  for (; j < n; j += LANES) step_band(S + j, n, K, a, ka, qa, k, sum(qk), beta, v + j, o + j, 1);
}

int NAME(kda_step)(const Step *f) {
  const I items = f->B * f->H;
#pragma omp parallel num_threads(f->threads < items ? f->threads : items) if (f->threads > 1 && items > 1)
  {
    unsigned before = flush_denormals();
#pragma omp for schedule(static)
    for (I i = 0; i < items; i++) step_head(f, i / f->H, i % f->H);
    restore(before);
  }
  return 0;
}
