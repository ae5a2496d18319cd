/* One KDA chunk of 16 positions of one head, forward (FlashKDA's form: u by forward substitution, W never formed).

   With e_t = exp(g_t), P_t = e_1 .. e_t and c = 2^58 (about e^40, half the span of a chunk at the strongest gate, and a
   power of two, so that scaling by it is exact):

     qh_t = c P_t q_t    kh_t = c P_t k_t    kb_t = k_t / (c P_t)    kt_t = k_t e_{t+1} .. e_16    end = P_16
     X = strictly lower(kh kb^T)    A = lower(qh kb^T)
     w_t = v_t - (kh_t S) / c - sum over j < t of X_tj u_j       u_t = beta_t w_t
     o_t = (qh_t S) / c + sum over j <= t of A_tj u_j            S' = end o S + kt^T u

   For g in [-5, 0] all exponents lie within +-40: nothing overflows and no denormal matters. Decays are products of
   e_t, never differences of sums: these would lose a weak gate behind strong ones. The anchor is the chunk's start and
   a constant, so position t depends on nothing behind t, to the last bit. */

#define CHUNK 16
#define TRIANGLES (2 * CHUNK * CHUNK) /* of X and A */
#define SHIFT ((REAL)288230376151711744.0) /* 2^58 */
#define UNSHIFT ((REAL)1 / SHIFT)

typedef struct {
  REAL *kh;   /* [32][K]: kh, then qh */
  REAL *kb;   /* [16][K] */
  REAL *kt;   /* [16][K] */
  REAL *dh;   /* [16][K]: c P, for the backward pass; null if not wanted */
  REAL *end;  /* [K] */
  REAL *xa;   /* [32][16]: X, then A */
  REAL beta[CHUNK];
} Chunk;

enum { CHUNK_ROWS = 2 * CHUNK + 3 * CHUNK + 1 }; /* rows of K that a Chunk takes, dh included; xa comes on top */

static REAL *lay_out(Chunk *c, REAL *at, I K, int with_dh) {
  c->kh = at;
  c->kb = c->kh + 2 * CHUNK * K;
  c->kt = c->kb + CHUNK * K;
  c->dh = with_dh ? c->kt + CHUNK * K : 0;
  c->end = c->kt + (with_dh ? 2 : 1) * CHUNK * K;
  c->xa = c->end + K;
  return c->xa + 2 * CHUNK * CHUNK;
}

/* Where 16 positions of one head lie: pointers to the first, strides between them. `ahead` positions further lies what
   comes next; it is asked for early, since heads alternate in memory and the processor does not guess that. */
typedef struct {
  const REAL *q, *k, *v, *g;
  I qs, ks, vs, gs, ahead;
} Rows;

static void prepare(Chunk *c, const Rows *in, I K) {
  for (I i = 0; i < K; i += LANES) {
    V e[CHUNK], keys[CHUNK], total = {0}, d = splat(SHIFT), z = splat(1);
#pragma GCC unroll 2
    for (int t = 0; t < CHUNK; t++) {
      V g = load(in->g + t * in->gs + i), k = keys[t] = load(in->k + t * in->ks + i);
      fetch(in->q + (t + in->ahead) * in->qs + i);
      fetch(in->k + (t + in->ahead) * in->ks + i);
      fetch(in->g + (t + in->ahead) * in->gs + i);
      e[t] = vexp(g);
      total += g;
      d *= e[t];
      store(c->kh + t * K + i, k * d);
      store(c->kh + (CHUNK + t) * K + i, load(in->q + t * in->qs + i) * d);
      store(c->kb + t * K + i, k / d);
      if (c->dh) store(c->dh + t * K + i, d);
    }
    /* Carried over many chunks, so rounded once, not sixteen times. */
    store(c->end + i, vexp(total));
    for (int t = CHUNK - 1; t >= 0; t--) {
      store(c->kt + t * K + i, keys[t] * z);
      z *= e[t];
    }
  }
}

/* X and A, their upper triangles filled with what nobody reads. turned: room for [K][16]. */
static void triangles(Chunk *c, REAL *turned, I K) {
  transpose(c->kb, K, turned, CHUNK, CHUNK, K);
  product(c->kh, K, turned, CHUNK, PANEL, K, c->xa, CHUNK, 2 * CHUNK, CHUNK);
}

/* One vector of columns of v: w, u and o from reads [32][rs] = (kh; qh) S. */
static INLINE void column(const Chunk *c, const REAL *reads, I rs, const REAL *v, I vs, REAL *o, I os, REAL *w, I ws,
                          REAL *u, I us) {
  V t[CHUNK];
#pragma GCC unroll 16
  for (int i = 0; i < CHUNK; i++) {
    fetch(v + (CHUNK + i) * vs);
    t[i] = load(v + i * vs) - load(reads + i * rs) * UNSHIFT;
  }
#pragma GCC unroll 16
  for (int j = 0; j < CHUNK; j++) {
    if (w) store(w + j * ws, t[j]);
    t[j] *= c->beta[j];
    store(u + j * us, t[j]);
#pragma GCC unroll 16
    for (int i = 0; i < CHUNK; i++)
      if (i > j) t[i] -= c->xa[i * CHUNK + j] * t[j];
  }
#pragma GCC unroll 16
  for (int i = 0; i < CHUNK; i++) {
    V y = load(reads + (CHUNK + i) * rs) * UNSHIFT;
#pragma GCC unroll 16
    for (int j = 0; j < CHUNK; j++)
      if (j <= i) y += c->xa[(CHUNK + i) * CHUNK + j] * t[j];
    fetch_to_write(o + (CHUNK + i) * os);
    if (w) fetch_to_write(w + (CHUNK + i) * ws);
    store(o + i * os, y);
  }
}

/* o and the new S (panelled) of a prepared chunk, a panel at a time so that it stays in the nearest cache. room:
   [32 + 16][PANEL]. w may be null. */
static void advance(const Chunk *c, const REAL *v, I vs, REAL *o, I os, REAL *w, I ws, REAL *S, I K, I n, REAL *room) {
  REAL *reads = room, *u = room + 2 * CHUNK * PANEL;
  for (I j = 0; j < n; j += PANEL, S += K * PANEL) {
    const I wide = width_at(j, n);
    product(c->kh, K, S, PANEL, 0, K, reads, PANEL, 2 * CHUNK, wide);
    for (I i = 0; i < wide; i += LANES)
      column(c, reads + i, PANEL, v + j + i, vs, o + j + i, os, w ? w + j + i : 0, ws, u + i, PANEL);
    update(S, S, c->end, c->kt, K, u, PANEL, CHUNK, K, wide);
  }
}
