/* A block of ops/overlap.py's rows in C: 16 rows, one in each lane, so that sums over the vocabulary need no lanes to
   be folded. Logits lie [token][16]; the heads are read row by row, each row once a pass.

   Threads share the vocabulary out in fixed parts and their sums are added in order: a result depends on the number of
   threads, not on their speed. Structs are arrays of 64-bit words in the order of overlap_native.py. */

#include "overlap.h"

/* ----------------------------------------------------------------- measure */

typedef struct {
  const float *hq, *wq, *hp, *wp; /* hidden [rows][D], head [Nq][D] of the draft; [rows][E], [Np][E] of the target */
  const I *t2d;                   /* [Np], draft id or -1; null: the same tokens */
  const float *lse;               /* [16], of the target's logits; null: to be found over wp's tokens */
  float *log_q, *log_p;           /* out, [Nq][16] */
  float *out;                     /* out, [5][16]: log alpha, short, missing, mass, divergence */
  I rows, D, E, Nq, Np, threads;
  double scale_q, scale_p; /* 1 / temperature */
} Measure;

/* Running log of the sum of e^z over tokens, per lane. */
typedef struct {
  V top;
  W total;
} LogSum;

static INLINE LogSum nothing(void) { return (LogSum){splat(-INFINITY), {0}}; }

static INLINE void include(LogSum *s, const float *z, I n) {
  V top = s->top, part = {0};
  for (I i = 0; i < n; i++) top = larger(top, load(z + i * LANES));
  for (I i = 0; i < n; i++) part += vexp(load(z + i * LANES) - top);
  s->total = s->total * wide(vexp(s->top - top)) + wide(part);
  s->top = top;
}

static V log_sum(const LogSum *s, I n) {
  LogSum all = s[0];
  for (I i = 1; i < n; i++) {
    V top = larger(all.top, s[i].top);
    all.total = all.total * wide(vexp(all.top - top)) + s[i].total * wide(vexp(s[i].top - top));
    all.top = top;
  }
  V out;
  for (int i = 0; i < LANES; i++) out[i] = (float)(all.top[i] + log(all.total[i]));
  return out;
}

/* This thread's part of the target's logits: logsumexp of all, logits of those the draft can say. */
static LogSum target_logits(const Measure *m, const float *h, I from, I to) {
  LogSum s = nothing();
  float z[TOKENS * LANES];
  for (I v = from; v < to; v += TOKENS) {
    I n = to - v < TOKENS ? to - v : TOKENS;
    logits(m->wp + v * m->E, h, m->E, n, z);
    include(&s, z, n);
    for (I i = 0; i < n; i++) {
      I own = m->t2d ? m->t2d[v + i] : v + i;
      if (own >= 0) store(m->log_p + own * LANES, load(z + i * LANES));
    }
  }
  return s;
}

static LogSum draft_logits(const Measure *m, const float *h, I from, I to) {
  LogSum s = nothing();
  for (I v = from; v < to; v += TOKENS) {
    I n = to - v < TOKENS ? to - v : TOKENS;
    float *z = m->log_q + v * LANES;
    logits(m->wq + v * m->D, h, m->D, n, z);
    include(&s, z, n);
  }
  return s;
}

/* Logits become log p and log q; the largest of min(log p, log q) in this part. */
static V normalise(const Measure *m, V lse_p, V lse_q, I from, I to) {
  V top = splat(-INFINITY);
  for (I v = from; v < to; v++) {
    V p = load(m->log_p + v * LANES) - lse_p, q = load(m->log_q + v * LANES) - lse_q;
    store(m->log_p + v * LANES, p);
    store(m->log_q + v * LANES, q);
    top = larger(top, smaller(p, q));
  }
  return top;
}

static Sums add_up(const Measure *m, V top, I from, I to) {
  Sums s = {{0}, {0}, {0}, {0}, {0}};
  V scale = vexp(top);
  for (I v = from; v < to;) {
    Few few = {{0}, {0}, {0}, {0}, {0}};
    for (I end = v + TOKENS < to ? v + TOKENS : to; v < end; v++)
      count(&few, load(m->log_p + v * LANES), load(m->log_q + v * LANES), top, scale);
    const Sums more = widened(&few);
    join(&s, &more);
  }
  return s;
}

static void finish(const Sums *s, I threads, V top, float *out) {
  Sums all = s[0];
  for (I t = 1; t < threads; t++) join(&all, s + t);
  for (int i = 0; i < LANES; i++) {
    out[i] = (float)(top[i] + log(all.both[i]));
    out[LANES + i] = (float)(all.short_[i] / all.both[i]);
    out[2 * LANES + i] = (float)all.missing[i];
    out[3 * LANES + i] = (float)all.mass[i];
    out[4 * LANES + i] = (float)all.divergence[i];
  }
}

/* 0, or 1 when memory ran out. */
int overlap_measure(const Measure *m) {
  const I threads = m->threads;
  float *hq = scratch(m->D * LANES), *hp = scratch(m->E * LANES);
  LogSum *in_p = scratch(threads * sizeof(LogSum) / sizeof(float)),
         *in_q = scratch(threads * sizeof(LogSum) / sizeof(float));
  V *tops = scratch(threads * LANES);
  Sums *sums = scratch(threads * sizeof(Sums) / sizeof(float));
  const int failed = !hq || !hp || !in_p || !in_q || !tops || !sums;
  if (!failed) {
    turned(m->hq, m->rows, m->D, (float)m->scale_q, hq);
    turned(m->hp, m->rows, m->E, (float)m->scale_p, hp);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (I t = 0; t < threads; t++) {
      in_p[t] = target_logits(m, hp, part(m->Np, t, threads), part(m->Np, t + 1, threads));
      in_q[t] = draft_logits(m, hq, part(m->Nq, t, threads), part(m->Nq, t + 1, threads));
    }
    V lse_p = m->lse ? load(m->lse) : log_sum(in_p, threads), lse_q = log_sum(in_q, threads), top = splat(-INFINITY);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (I t = 0; t < threads; t++)
      tops[t] = normalise(m, lse_p, lse_q, part(m->Nq, t, threads), part(m->Nq, t + 1, threads));
    for (I t = 0; t < threads; t++) top = larger(top, tops[t]);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (I t = 0; t < threads; t++) sums[t] = add_up(m, top, part(m->Nq, t, threads), part(m->Nq, t + 1, threads));
    finish(sums, threads, top, m->out);
  }
  free(hq), free(hp), free(in_p), free(in_q), free(tops), free(sums);
  return failed;
}

/* ----------------------------------------------------------------- descend */

typedef struct {
  const float *h, *w;         /* the draft's hidden [rows][D] and head [N][D] */
  const float *log_q, *log_p; /* as `measure` left them, [N][16] */
  const float *push;          /* [3][16]: own, log_short, target */
  float *dh, *dw;             /* added to: [rows][D], [N][D]; null where not wanted */
  I rows, D, N, threads;
} Descend;

/* d loss / d logits of n tokens, [n][16]. */
static INLINE void slopes(const Descend *d, I v, I n, float *out) {
  V own = load(d->push), log_short = load(d->push + LANES), target = load(d->push + 2 * LANES);
  for (I i = 0; i < n; i++) {
    V p = load(d->log_p + (v + i) * LANES), q = load(d->log_q + (v + i) * LANES);
    store(out + i * LANES, own * expo(q) - target * expo(p) - pick(q < p, expo(q + log_short), splat(0)));
  }
}

int overlap_descend(const Descend *d) {
  const I D = d->D, threads = d->threads;
  float *h = scratch(LANES * D), *dh = scratch(threads * LANES * D);
  const int failed = !h || !dh;
  if (!failed) {
    memset(h, 0, LANES * D * sizeof(float));
    memcpy(h, d->h, d->rows * D * sizeof(float));
    memset(dh, 0, threads * LANES * D * sizeof(float));
#pragma omp parallel for num_threads(threads) schedule(static)
    for (I t = 0; t < threads; t++) {
      float z[TOKENS * LANES];
      for (I v = part(d->N, t, threads), to = part(d->N, t + 1, threads); v < to; v += TOKENS) {
        I n = to - v < TOKENS ? to - v : TOKENS;
        slopes(d, v, n, z);
        const float *w = d->w + v * D;
        if (d->dw) add_product(z, LANES, 1, n, h, LANES, D, d->dw + v * D, d->dw + (v + n) * D);
        if (d->dh) add_product(z, 1, LANES, LANES, w, n, D, dh + t * LANES * D, w + n * D);
      }
    }
    for (I t = 0; d->dh && t < threads; t++)
      for (I i = 0; i < d->rows * D; i++) d->dh[i] += dh[t * LANES * D + i];
  }
  free(h), free(dh);
  return failed;
}
