/* One decode step of a whole model for B rows, in float32: the native twin of Model.forward with one token per row.

   Rows never meet, so each thread carries a block of rows through every layer without waiting for the others. Weights
   are read where torch keeps them; nothing is packed, so nothing can be stale. */

#include "decode_experts.h"
#include "decode_mixers.h"

/* What a block of rows reads from and adds to (model/attn_res.py): block sums so far with their 1/rms, and the running
   sum. Banks are laid out [source][row][D]. */
typedef struct {
  I rows, D, banked;
  int empty;
  float *current, *banks, *inverse, eps;
} Stream;

static float inverse_rms(const float *x, I n, float eps) { return 1.0f / sqrtf(dot(x, x, n) / n + eps); }

/* h = what a site reads; the running sum itself where nothing is banked. */
static const float *look(const Stream *t, const float *query, const float *norm, float *h, float *s) {
  if (!query || !t->banked) return t->current;
  I D = t->D, J = t->banked + 1;
  float *q = s, *w = q + D + LANES;
  for (I i = 0; i < D; i++) q[i] = query[i] * norm[i];
  for (I r = 0; r < t->rows; r++) {
    float top = -INFINITY, total = 0;
    for (I j = 0; j < J; j++) {
      int open = j == t->banked;
      const float *v = open ? t->current + r * D : t->banks + (j * t->rows + r) * D;
      w[j] = dot(q, v, D) * (open ? inverse_rms(v, D, t->eps) : t->inverse[j * t->rows + r]);
      top = w[j] > top ? w[j] : top;
    }
    for (I j = 0; j < J; j++) total += w[j] = expf(w[j] - top);
    for (I i = 0; i < D; i++) {
      float x = 0;
      for (I j = 0; j < t->banked; j++) x += w[j] * t->banks[(j * t->rows + r) * D + i];
      h[r * D + i] = (x + w[t->banked] * t->current[r * D + i]) / total;
    }
  }
  return h;
}

static void bank(Stream *t) {
  I n = t->rows * t->D, at = t->banked * t->rows;
  memcpy(t->banks + at * t->D, t->current, n * sizeof(float));
  for (I r = 0; r < t->rows; r++) t->inverse[at + r] = inverse_rms(t->current + r * t->D, t->D, t->eps);
  t->banked++;
  t->empty = 1;
}

static void add(Stream *t, const float *y) {
  for (I j = 0; j < t->rows * t->D; j++) t->current[j] = t->empty ? y[j] : t->current[j] + y[j];
  t->empty = 0;
}

static void block(const Model *m, const Layer *layers, float *x, I rows, I first, const Rows *where, float *logits,
                  float *scratch) {
  I D = m->D, sources = m->residual ? (m->layers + m->residual - 1) / m->residual : 0;
  float *h = scratch, *seen = h + BLOCK * D, *y = seen + BLOCK * D, *banks = y + BLOCK * D;
  float *inverse = banks + sources * BLOCK * D, *s = inverse + sources * BLOCK;
  Stream t = {rows, D, 0, 0, x, banks, inverse, m->eps};
  for (I i = 0; i < m->layers; i++) {
    const Layer *l = layers + i;
    const float *from = look(&t, l->mix1, l->mix1_norm, seen, s);
    for (I r = 0; r < rows; r++) rmsnorm(from + r * D, l->ln1, h + r * D, D, m->eps);
    if (m->residual && i % m->residual == 0) bank(&t);
    if (l->kind == GQA) gqa(m, l, h, rows, first, where, y, s);
    if (l->kind == KDA) kda(m, l, h, rows, first, where, y, s);
    if (l->kind == MLA) mla(m, l, h, rows, first, where, y, s);
    add(&t, y);
    from = look(&t, l->mix2, l->mix2_norm, seen, s);
    for (I r = 0; r < rows; r++) rmsnorm(from + r * D, l->ln2, h + r * D, D, m->eps);
    if (l->ffn == ROUTED) routed(m, l, h, rows, y, s);
    else dense(m, l, h, rows, y, s);
    add(&t, y);
  }
  const float *from = look(&t, m->mix, m->mix_norm, seen, s);
  for (I r = 0; r < rows; r++) rmsnorm(from + r * D, m->norm, h + r * D, D, m->eps);
  linear(h, D, m->head, 0, logits + first * m->W, m->W, rows, m->W, D);
}

/* x [B][D]: embeddings, overwritten. scratch_floats: per thread, of which there are at most `threads`. Returns 0, or 1
   when memory ran out. */
int decode_step(const Model *m, const Layer *layers, float *x, const Rows *where, float *logits, I scratch_floats,
                I threads) {
  int failed = 0;
  I B = where->B, blocks = (B + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(threads < blocks ? threads : blocks)
  {
    float *scratch = aligned_alloc(64, (scratch_floats * sizeof(float) + 63) / 64 * 64);
    if (!scratch) failed = 1;
#pragma omp for schedule(dynamic)
    for (I first = 0; first < B; first += BLOCK)
      if (scratch)
        block(m, layers, x + first * m->D, B - first < BLOCK ? B - first : BLOCK, first, where, logits, scratch);
    free(scratch);
  }
  return failed;
}
