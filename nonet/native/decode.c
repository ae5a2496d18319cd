/* A few tokens of B sequences through a whole model, in float32: the native twin of Model.forward.

   Sequences never meet, so either each thread carries a block of them through every layer without waiting for the
   others, or all threads carry the same rows, each computing its own columns and heads, and meet after every product.
   The second reads each weight once and keeps every core busy at batch 1; `together` asks for it. Results are the same
   to the last bit, and the same as one token at a time. */

#include <omp.h>

#include "decode_attention.h"
#include "decode_experts.h"
#include "decode_kda.h"

/* What rows read from and add to (model/attn_res.py): block sums so far with their 1/rms, and the running sum. Banks
   are laid out [source][row][D]. Each thread tends the rows from..to. */
typedef struct {
  I rows, D, banked, from, to;
  int empty;
  float *current, *banks, *inverse, eps;
} Stream;

static float inverse_rms(const float *x, I n, float eps) { return 1.0f / sqrtf(dot(x, x, n) / n + eps); }

/* out[D] = what a site reads for row r; s: room for a query and a weight per source. */
static void look(const Stream *t, I r, const float *query, const float *norm, float *out, float *s) {
  const I D = t->D, J = t->banked + 1;
  float *q = s, *w = q + D, top = -INFINITY, total = 0;
  for (I i = 0; i < D; i++) q[i] = query[i] * norm[i];
  for (I j = 0; j < J; j++) {
    const int open = j == t->banked;
    const float *v = open ? t->current + r * D : t->banks + (j * t->rows + r) * D;
    w[j] = dot(q, v, D) * (open ? inverse_rms(v, D, t->eps) : t->inverse[j * t->rows + r]);
    top = w[j] > top ? w[j] : top;
  }
  for (I j = 0; j < J; j++) total += w[j] = expf(w[j] - top);
  for (I i = 0; i < D; i++) {
    float x = 0;
    for (I j = 0; j < t->banked; j++) x += w[j] * t->banks[(j * t->rows + r) * D + i];
    out[i] = (x + w[t->banked] * t->current[r * D + i]) / total;
  }
}

/* h[rows][D] = norm of what a site reads; of the running sum itself where nothing is banked. feature: where row 0's
   goes before the norm, the other rows' `apart` floats apart; or null. */
static void read(const Stream *t, const float *query, const float *query_norm, const float *norm, float *h, float *s,
                 float *feature, I apart) {
  for (I r = t->from; r < t->to; r++) {
    float *x = h + r * t->D;
    const int mixed = query && t->banked;
    if (mixed) look(t, r, query, query_norm, x, s);
    const float *v = mixed ? x : t->current + r * t->D;
    if (feature) memcpy(feature + r * apart, v, t->D * sizeof(float));
    rmsnorm(v, norm, x, t->D, t->eps);
  }
}

static void bank(Stream *t) {
  for (I r = t->from; r < t->to; r++) {
    const float *x = t->current + r * t->D;
    memcpy(t->banks + (t->banked * t->rows + r) * t->D, x, t->D * sizeof(float));
    t->inverse[t->banked * t->rows + r] = inverse_rms(x, t->D, t->eps);
  }
  t->banked++;
  t->empty = 1;
}

static void add(Stream *t, const float *y) {
  for (I j = t->from * t->D; j < t->to * t->D; j++) t->current[j] = t->empty ? y[j] : t->current[j] + y[j];
  t->empty = 0;
}

static I sources(const Model *m) { return m->residual ? (m->layers + m->residual - 1) / m->residual : 0; }

/* Where the feature after `layers` layers of the first of w's rows goes; null if nobody asks for it. */
static float *tapped(const Work *w, I layers) {
  const Rows *where = w->where;
  for (I i = 0; i < where->taps; i++)
    if (where->tap[i] == layers) return where->features + (w->first * where->taps + i) * w->m->D;
  return 0;
}

/* h[rows][2 D] = [norm of what lies beside; norm of the running sum]: the pairs of a draft. They are joined to the sum
   that its block starts from (an MTP layer), or are themselves what its layer reads (EAGLE-3's). */
static void pair(const Work *w, const Stream *s, float *h, float *y) {
  const Model *m = w->m;
  const I D = m->D;
  for (I r = s->from; r < s->to; r++) {
    float *x = h + 2 * r * D, *sum = s->current + r * D;
    rmsnorm(w->where->beside + (w->first + r) * D, m->beside_norm, x, D, m->eps);
    rmsnorm(sum, m->stream_norm, x + D, D, m->eps);
    if (m->normed) memcpy(sum, x + D, D * sizeof(float));
  }
  if (!m->join) return;
  meet(&w->team);
  linear(&w->team, weight(m, m->join, 0, D, 2 * D), h, w->rows, y);
  meet(&w->team);
  memcpy(s->current + s->from * D, y + s->from * D, (s->to - s->from) * D * sizeof(float));
}

/* How many times D a mixer reads at most. */
static I parts(const Model *m) { return m->beside_norm ? 2 : 1; }

/* Carry w->rows rows from x through every layer to their logits. */
static void carry(Work w, const Layer *layers, float *x, float *logits) {
  const Model *m = w.m;
  const Team *t = &w.team;
  const I D = m->D, R = w.rows, J = sources(m), apart = w.where->taps * D;
  float *h = w.shared, *y = h + R * D * parts(m), *banks = y + R * D, *inverse = banks + J * R * D;
  Stream s = {R, D, 0, 0, 0, 0, x, banks, inverse, m->eps};
  share(t, R, 1, &s.from, &s.to);
  w.shared = inverse + (J * R + LANES) / LANES * LANES;
  if (m->beside_norm) pair(&w, &s, h, y);
  for (I i = 0; i < m->layers; i++) {
    const Layer *l = layers + i;
    if (l->reads == D) read(&s, l->mix1, l->mix1_norm, l->ln1, h, w.own, tapped(&w, i), apart);
    if (m->residual && i % m->residual == 0) bank(&s);
    meet(t);
    if (l->kind == GQA) gqa(&w, l, h, y);
    if (l->kind == KDA) kda(&w, l, h, y);
    if (l->kind == MLA) mla(&w, l, h, y);
    meet(t);
    add(&s, y);
    read(&s, l->mix2, l->mix2_norm, l->ln2, h, w.own, 0, 0);
    meet(t);
    if (l->ffn == ROUTED) routed(&w, l, h, y);
    else dense(&w, l, h, y);
    meet(t);
    add(&s, y);
  }
  read(&s, m->mix, m->mix_norm, m->norm, h, w.own, tapped(&w, m->layers), apart);
  meet(t);
  linear(t, weight(m, m->head, 0, m->W, D), h, R, logits);
  meet(t);
}

static I larger(I a, I b) { return a > b ? a : b; }

/* Floats a team needs for `rows` rows of at most `longest` positions; what one thread of it needs alone. */
static I shared_floats(const Model *m, const Layer *layers, I rows, I longest) {
  const I H = m->H, T = m->R + m->extra, D = m->D, slots = m->top_k;
  const I gqa = 2 * (H + m->G) * m->K + spans(longest) * H * record(m->K);
  const I kda = 5 * H * m->KK + H + m->rank + m->gate_rank;
  const I mla = m->q_rank + H * (m->nope + m->extra + 2 * m->VD + T + m->R) + T + spans(longest) * H * record(m->R);
  const I stream = (1 + parts(m)) * D + sources(m) * (D + 1);
  I most = larger(larger(gqa, kda), mla);
  for (I i = 0; i < m->layers; i++) {
    const I F = layers[i].F;
    most = larger(most, 2 * F);
    if (layers[i].ffn == ROUTED) most = larger(most, slots * (3 + m->EF) + m->E + 2 * m->L + 2 * F + D);
  }
  return rows * (stream + most) + 2 * LANES;
}

static I own_floats(const Model *m, I rows) {
  const I mixers = larger(m->H * SPAN, 3 * m->kernel * m->KK), site = m->D + sources(m) + 1;
  return larger(larger(mixers, site), rows * (m->L + m->EF)) + LANES;
}

/* Floats of room for the rows of any product, split: two numbers of 16 bits each. */
static I room_floats(const Model *m, const Layer *layers, I rows) {
  I widest = larger(larger(m->D, m->H * larger(m->K, larger(m->KK, m->VD))), larger(m->L, m->EF));
  widest = larger(larger(widest, parts(m) * m->D), larger(larger(m->rank, m->gate_rank), m->q_rank));
  for (I i = 0; i < m->layers; i++) widest = larger(widest, layers[i].F);
  return halved(m->format) || halved(m->expert_format) ? rows * (widest + GROUP) : 0;
}

static I whole_lines(I floats) { return (floats + LANES - 1) / LANES * LANES; }

/* Floats of scratch for so many rows, the longest of `longest` positions. */
I decode_scratch(const Model *m, const Layer *layers, I count, I longest, I threads, I together) {
  const I limit = together ? MOST : ALONE, rows = count < limit ? count : limit;
  const I shared = whole_lines(shared_floats(m, layers, rows, longest)), own = whole_lines(own_floats(m, rows));
  const I room = whole_lines(room_floats(m, layers, rows));
  return (together ? 1 : threads) * shared + threads * (own + room);
}

/* x [B * T][D]: embeddings, overwritten. together: whether all threads carry the same rows. scratch: as many floats as
   decode_scratch says, at a multiple of 64 bytes. Returns how often a thread waited for one that had no core. */
I decode_step(const Model *m, const Layer *layers, float *x, const Rows *where, float *logits, float *scratch,
              I longest, I threads, I together) {
  const I T = where->T, count = where->B * T, limit = together ? MOST : ALONE, most = count < limit ? count : limit;
  const I shared = whole_lines(shared_floats(m, layers, most, longest)), own = whole_lines(own_floats(m, most));
  const I room = whole_lines(room_floats(m, layers, most));
  const I block = T < limit ? limit / T * T : T, blocks = (count + block - 1) / block; /* of whole sequences */
  Gate gate = {0, 0, 0};
#pragma omp parallel num_threads(together || threads < blocks ? threads : blocks)
  {
    const I rank = omp_get_thread_num(), step = together ? block : block * omp_get_num_threads();
    float *mine = scratch + (together ? 0 : rank * shared);
    float *alone = scratch + (together ? 1 : threads) * shared + rank * (own + room);
    const Team team = {together ? rank : 0, together ? omp_get_num_threads() : 1, &gate, (uint16_t *)(alone + own)};
    for (I begin = together ? 0 : rank * block; begin < count; begin += step) {
      const I end = count - begin < block ? count : begin + block;
      for (I first = begin; first < end; first += limit) {
        const I rows = end - first < limit ? end - first : limit;
        Row row[MOST];
        locate(where, first, rows, row);
        const Work w = {team, m, where, row, first, rows, mine, alone};
        carry(w, layers, x + first * m->D, logits + first * m->W);
      }
    }
  }
  return atomic_load(&gate.stalls);
}
