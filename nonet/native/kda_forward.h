/* KDA over whole sequences: chunks in turn, sequences and heads in parallel. */

/* Arguments come as one array of 64-bit words: addresses and integers, in this order. Strides count elements. */
typedef struct {
  const REAL *q, *k, *v, *g, *beta;
  I q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h; /* per row, position, head */
  const I *sequences;  /* [N][3]: row, first position, positions */
  const REAL *state;   /* [N][H][K][V] or null: zeros */
  REAL *o;             /* [B][T][H][V]; positions of no sequence are not written */
  REAL *end;           /* [N][H][K][V] */
  REAL *w;             /* [B][T][H][V] or null; with it */
  REAL *kept;          /* [blocks][H][kept_size], for gradients; a block is KEEP chunks: the state in front of them,
                          panelled, then X and A of each */
  const I *first_kept; /* [N]: index of each sequence's first block */
  const I *wanted;     /* [E][2]: sequence and position, a multiple of 16, whose state goes to */
  REAL *exported;      /* [E][H][K][V] */
  I N, T, H, K, V, E, threads;
} Forward;

enum { KEEP = 4 }; /* chunks between kept states */

/* Room for one state as any level lays it out, and for the triangles of KEEP chunks. */
static INLINE I kept_size(I K, I n) { return K * ((n + 31) / 32 * 32) + KEEP * TRIANGLES; }

static void export_states(const Forward *f, I n, I h, I position, const REAL *S) {
  const I size = f->K * f->V;
  for (I e = 0; e < f->E; e++)
    if (f->wanted[2 * e] == n && f->wanted[2 * e + 1] == position)
      unpack(S, f->exported + (e * f->H + h) * size, f->K, f->V);
}

/* Copy `have` positions into [16][width] at `to`, zeros behind them. */
static const REAL *padded(REAL *to, const REAL *from, I stride, I have, I width) {
  for (I t = 0; t < CHUNK; t++)
    if (t < have) memcpy(to + t * width, from + t * stride, width * sizeof(REAL));
    else memset(to + t * width, 0, width * sizeof(REAL));
  return to;
}

/* A last chunk is filled up with zeros; g = 0 and beta = 0 leave the state alone. */
static void pad_rows(Rows *in, REAL *room, I have, I K, I n) {
  in->q = padded(room, in->q, in->qs, have, K);
  in->k = padded(room + CHUNK * K, in->k, in->ks, have, K);
  in->g = padded(room + 2 * CHUNK * K, in->g, in->gs, have, K);
  if (in->v) in->v = padded(room + 3 * CHUNK * K, in->v, in->vs, have, n);
  in->qs = in->ks = in->gs = K;
  in->vs = n;
}

static void forward_head(const Forward *f, I n, I h, REAL *room) {
  const I K = f->K, n_v = f->V, size = K * n_v, row = f->sequences[3 * n], begin = f->sequences[3 * n + 1];
  const I count = f->sequences[3 * n + 2], vs = f->H * n_v;
  Chunk c;
  REAL *turned = lay_out(&c, room, K, 0), *panel = turned + K * CHUNK, *pad = panel + 3 * CHUNK * PANEL;
  REAL *pad_o = pad + 3 * CHUNK * K + CHUNK * n_v, *pad_w = pad_o + CHUNK * n_v, *S = pad_w + CHUNK * n_v;
  if (f->state) pack(f->state + (n * f->H + h) * size, S, K, n_v);
  else memset(S, 0, panelled(K, n_v) * sizeof(REAL));
  for (I t = 0; t < count; t += CHUNK) {
    const I have = count - t < CHUNK ? count - t : CHUNK, at = begin + t;
    Rows in = {f->q + row * f->q_b + at * f->q_t + h * f->q_h, f->k + row * f->k_b + at * f->k_t + h * f->k_h,
               f->v + row * f->v_b + at * f->v_t + h * f->v_h, f->g + row * f->g_b + at * f->g_t + h * f->g_h,
               f->q_t, f->k_t, f->v_t, f->g_t, CHUNK};
    REAL *o = f->o + (row * f->T + at) * vs + h * n_v, *w = f->w ? f->w + (row * f->T + at) * vs + h * n_v : 0;
    export_states(f, n, h, t, S);
    REAL *kept = f->w ? f->kept + ((f->first_kept[n] + t / CHUNK / KEEP) * f->H + h) * kept_size(K, n_v) : 0;
    if (kept && t / CHUNK % KEEP == 0) memcpy(kept, S, panelled(K, n_v) * sizeof(REAL));
    if (have < CHUNK) pad_rows(&in, pad, have, K, n_v);
    for (I i = 0; i < CHUNK; i++)
      c.beta[i] = i < have ? f->beta[row * f->beta_b + (at + i) * f->beta_t + h * f->beta_h] : 0;
    prepare(&c, &in, K);
    triangles(&c, turned, K);
    if (kept) memcpy(kept + panelled(K, n_v) + t / CHUNK % KEEP * TRIANGLES, c.xa, TRIANGLES * sizeof(REAL));
    if (have == CHUNK) {
      advance(&c, in.v, in.vs, o, vs, w, vs, S, K, n_v, panel);
      continue;
    }
    advance(&c, in.v, in.vs, pad_o, n_v, w ? pad_w : 0, n_v, S, K, n_v, panel);
    for (I i = 0; i < have; i++) {
      memcpy(o + i * vs, pad_o + i * n_v, n_v * sizeof(REAL));
      if (w) memcpy(w + i * vs, pad_w + i * n_v, n_v * sizeof(REAL));
    }
  }
  if (count % CHUNK == 0) export_states(f, n, h, count, S);
  unpack(S, f->end + (n * f->H + h) * size, K, n_v);
}

static I forward_room(I K, I n) {
  return CHUNK_ROWS * K + 2 * CHUNK * CHUNK + 4 * CHUNK * K + 3 * CHUNK * PANEL + 3 * CHUNK * n + panelled(K, n);
}

/* Returns 0, or 1 when memory ran out. */
int NAME(kda_forward)(const Forward *f) {
  const I items = f->N * f->H;
  int failed = 0;
#pragma omp parallel num_threads(f->threads < items ? f->threads : items) if (f->threads > 1 && items > 1)
  {
    unsigned before = flush_denormals();
    REAL *room = scratch(forward_room(f->K, f->V));
    if (!room) failed = 1;
#pragma omp for schedule(dynamic)
    for (I i = 0; i < items; i++)
      if (room) forward_head(f, i / f->H, i % f->H, room);
    free(room);
    restore(before);
  }
  return failed;
}
