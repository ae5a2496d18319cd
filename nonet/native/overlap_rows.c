/* What ops/overlap.py does to the logits of a block once somebody else has made them: bfloat16, [row][token]. A thread
   takes whole rows. Structs are arrays of 64-bit words in the order of overlap_native.py; columns are a multiple of 16,
   those after the last token hold logits of -1e30, which are nobody's probability. */

#include "overlap.h"

typedef uint16_t H __attribute__((vector_size(32), aligned(2)));
typedef uint32_t VU __attribute__((vector_size(64), aligned(4)));

static INLINE V widen(const uint16_t *p) {
  H h;
  memcpy(&h, p, sizeof h);
  return (V)(__builtin_convertvector(h, VU) << 16);
}

/* Rounded to nearest, ties to even. */
static INLINE void narrow(uint16_t *p, V v) {
  VU u = (VU)v;
  H h = __builtin_convertvector((u + 0x7fff + ((u >> 16) & 1)) >> 16, H);
  memcpy(p, &h, sizeof h);
}

static INLINE float largest(V v) {
  float top = v[0];
  for (int i = 1; i < LANES; i++) top = v[i] > top ? v[i] : top;
  return top;
}

static INLINE double total_of(W w) {
  double total = 0;
  for (int i = 0; i < LANES; i++) total += w[i];
  return total;
}

typedef struct {
  const uint16_t *zq, *zp; /* [rows][N], logits of the draft and, of the same tokens, of the target */
  float *lse;              /* [2][rows]: of q, out; of p, in where `known`, else out */
  float *out;              /* [5][rows]: log alpha, short, missing, mass, divergence */
  I rows, N, known, threads;
  double scale_q, scale_p; /* 1 / temperature */
} Measure;

static float log_sum(const uint16_t *z, I n, float scale) {
  V top = splat(-INFINITY), part = {0};
  W total = {0};
  for (I i = 0; i < n; i += LANES) top = larger(top, scale * widen(z + i));
  float highest = largest(top);
  for (I i = 0; i < n; i += LANES) {
    part += expo(scale * widen(z + i) - highest);
    if (i / LANES % 64 == 63) total += wide(part), part = (V){0};
  }
  return (float)(highest + log(total_of(total + wide(part))));
}

static void measure_row(const Measure *m, I r) {
  const uint16_t *zq = m->zq + r * m->N, *zp = m->zp + r * m->N;
  const float sq = (float)m->scale_q, sp = (float)m->scale_p;
  const float lse_q = log_sum(zq, m->N, sq), lse_p = m->known ? m->lse[m->rows + r] : log_sum(zp, m->N, sp);
  m->lse[r] = lse_q, m->lse[m->rows + r] = lse_p;
  V tops = splat(-INFINITY);
  for (I i = 0; i < m->N; i += LANES)
    tops = larger(tops, smaller(sp * widen(zp + i) - lse_p, sq * widen(zq + i) - lse_q));
  const float top = largest(tops);
  const V scale = vexp(splat(top));
  Sums s = {{0}, {0}, {0}, {0}, {0}};
  for (I i = 0; i < m->N;) {
    Few few = {{0}, {0}, {0}, {0}, {0}};
    for (I end = i + 64 * LANES < m->N ? i + 64 * LANES : m->N; i < end; i += LANES)
      count(&few, sp * widen(zp + i) - lse_p, sq * widen(zq + i) - lse_q, splat(top), scale);
    const Sums more = widened(&few);
    join(&s, &more);
  }
  const double both = total_of(s.both);
  m->out[r] = (float)(top + log(both));
  m->out[m->rows + r] = (float)(total_of(s.short_) / both);
  m->out[2 * m->rows + r] = (float)total_of(s.missing);
  m->out[3 * m->rows + r] = (float)total_of(s.mass);
  m->out[4 * m->rows + r] = (float)total_of(s.divergence);
}

int overlap_rows_measure(const Measure *m) {
#pragma omp parallel for num_threads(m->threads) schedule(static)
  for (I r = 0; r < m->rows; r++) measure_row(m, r);
  return 0;
}

typedef struct {
  uint16_t *zq; /* [rows][N]: logits of the draft in, d loss / d logit out */
  const uint16_t *zp;
  const float *lse, *push; /* as `measure` left it; [3][rows]: own, log_short, target */
  I rows, N, threads;
  double scale_q, scale_p;
} Slopes;

int overlap_rows_slopes(const Slopes *s) {
#pragma omp parallel for num_threads(s->threads) schedule(static)
  for (I r = 0; r < s->rows; r++) {
    uint16_t *zq = s->zq + r * s->N;
    const uint16_t *zp = s->zp + r * s->N;
    const float sq = (float)s->scale_q, sp = (float)s->scale_p, lse_q = s->lse[r], lse_p = s->lse[s->rows + r];
    const float own = s->push[r], log_short = s->push[s->rows + r], target = s->push[2 * s->rows + r];
    for (I i = 0; i < s->N; i += LANES) {
      V q = sq * widen(zq + i) - lse_q, p = sp * widen(zp + i) - lse_p;
      narrow(zq + i, own * expo(q) - target * expo(p) - pick(q < p, expo(q + log_short), splat(0)));
    }
  }
  return 0;
}
