// The driver: how a product is cut into thread shares, cache blocks and tiles.
//
//   share (m, n)              a thread's part of C
//    └ column block (nc)      its packed B: in the caller's memory, or packed into scratch a K block at a time
//       └ row band            all rows; a few when partial sums of a bf16 C must stay in scratch
//          └ K block          depends on K only
//             └ row block (mc)   packed A, sized for L2
//                └ panel of B, panel of A: one tile product
#include "model/ops_cpu/gemm.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "model/ops_cpu/gemm_table.h"

namespace dspark::model::cpu {
namespace {

constexpr int64_t kKBytes = 2048;      // bytes of a packed row's K block, at most
constexpr int64_t kRowBlock = 192;     // rows of A packed at a time, at most: they stay in L2
constexpr int64_t kColumnBytes = 2 << 20;  // B packed at a time: as many columns as fit, since A is packed again for each
constexpr int64_t kPartialRows = 384, kPartialColumns = 512;  // partial sums kept for a bf16 C
constexpr int64_t kScratchA = kRowBlock * kKBytes, kScratchB = kColumnBytes;
constexpr int64_t kScratchC = kPartialRows * kPartialColumns * 4;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

enum class Layout { rows, cols };  // of an operand: k contiguous, or the other dimension

struct Job {
  const GemmTable* table;
  int64_t m, n, k;
  MatRef a, b;
  Layout a_layout, b_layout;
  const std::byte* packed;  // packed B, or null
  int64_t panel_k;          // its panels' rows
  MatOut c;
  bool add;
  bool bf16_product;
  int64_t kc;       // of a K block, a multiple of the k unit
  int tm, tn;       // thread grid
  GemmContext* ctx;

  bool a_panel_bf16() const { return bf16_product && table->a_bf16; }
  int mr() const { return bf16_product ? table->mr_bf16 : table->mr_f32; }
  int64_t k_unit() const { return bf16_product ? table->k_unit_bf16 : 1; }
  int64_t b_bytes(int64_t k_elements) const { return k_elements * table->nr * (bf16_product ? 2 : 4); }
  // Columns of B that are packed at a time, a multiple of nr.
  int64_t column_block() const { return kColumnBytes / b_bytes(kc) * table->nr; }
};

// Equal parts of [0, n): the i-th of `parts`.
struct Range {
  int64_t begin, end;
};
Range part(int64_t n, int64_t parts, int64_t i) { return {n * i / parts, n * (i + 1) / parts}; }

const std::byte* at(const MatRef& m, int64_t row, int64_t col) {
  return static_cast<const std::byte*>(m.data) + (row * m.stride + col) * dtype_bytes(m.dtype);
}

PackArgs pack_args(const MatRef& m, Layout layout, int64_t w, int64_t k, int64_t k_len, int64_t k_pad) {
  PackArgs p = {};
  p.src = layout == Layout::rows ? at(m, w, k) : at(m, k, w);
  p.stride = m.stride;
  p.src_bf16 = m.dtype == DType::bf16;
  p.k = k_len;
  p.k_pad = k_pad;
  return p;
}

int64_t panel_rows(const Job& job, int64_t rows) {
  return job.a_panel_bf16() ? round_up(rows, job.table->row_unit_bf16) : rows;
}

// A source whose rows lie along the panel's width is packed a few k at a time through all panels: its rows are far apart,
// and so each one's pages and cache lines serve every panel before they are gone.
constexpr int64_t kPackStep = 64;

// Asks for k [begin, end) of columns `rows` of a source with k down its rows: a few cache lines of each, far apart, which the
// hardware does not foresee.
void prefetch_cols(const MatRef& m, Range rows, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) {
    const std::byte *p = at(m, k, rows.begin), *last = at(m, k, rows.end);
    for (; p < last; p += 64) __builtin_prefetch(p);
  }
}

// Packs rows [begin, end) of A for one K block, in `panels` panels of nearly equal height.
void pack_a(const Job& job, Range rows, int64_t panels, int64_t k0, int64_t k_len, int64_t k_pad, std::byte* dst) {
  const GemmTable& t = *job.table;
  const bool along_k = job.a_layout == Layout::rows, half = job.a_panel_bf16();
  const PackFn pack = job.bf16_product ? (along_k ? t.pack_a16_rows : t.pack_a16_cols)
                                       : (along_k ? t.pack_rows : t.pack_cols);
  const int64_t step = along_k ? k_pad : kPackStep;
  for (int64_t k = 0; k < k_pad; k += step) {
    if (!along_k) prefetch_cols(job.a, rows, k0 + k + step, k0 + std::min(k + 2 * step, k_len));
    std::byte* panel = dst;
    for (int64_t i = 0; i < panels; ++i) {
      const Range r = part(rows.end - rows.begin, panels, i);
      PackArgs p = pack_args(job.a, job.a_layout, rows.begin + r.begin, k0 + k, std::min(step, k_len - k),
                             std::min(step, k_pad - k));
      p.dst_bf16 = half;
      p.width_used = static_cast<int>(r.end - r.begin);
      p.width = static_cast<int>(panel_rows(job, p.width_used));
      p.dst = panel + k * p.width * (half ? 2 : 4);
      pack(p);
      panel += k_pad * p.width * (half ? 2 : 4);
    }
  }
  if (!along_k) prefetch_cols(job.a, {rows.end, std::min(job.m, 2 * rows.end - rows.begin)}, k0, k0 + std::min(step, k_len));  // the next block's first
}

// Packs columns [begin, end) of B, `begin` a multiple of nr.
void pack_b(const Job& job, Range cols, int64_t k0, int64_t k_len, int64_t k_pad, std::byte* dst, bool past_caches = false) {
  const int nr = job.table->nr;
  const bool along_k = job.b_layout == Layout::rows;
  const int64_t step = along_k ? k_pad : kPackStep;
  for (int64_t k = 0; k < k_pad; k += step) {
    std::byte* panel = dst;
    for (int64_t n = cols.begin; n < cols.end; n += nr, panel += job.b_bytes(k_pad)) {
      PackArgs p = pack_args(job.b, job.b_layout, n, k0 + k, std::min(step, k_len - k), std::min(step, k_pad - k));
      p.dst_bf16 = job.bf16_product;
      p.width = nr;
      p.width_used = static_cast<int>(std::min<int64_t>(nr, cols.end - n));
      p.dst = panel + job.b_bytes(k);
      p.past_caches = past_caches;
      (along_k ? job.table->pack_rows : job.table->pack_cols)(p);
    }
  }
}

// Where a K block's tiles read what they add to, and write.
struct Target {
  const float* in;
  int64_t in_stride;
  std::byte* out;
  int64_t out_stride;
  bool out_bf16;
};

// All tiles of one row block and column block for one K block.
void tiles(const Job& job, Range rows, Range cols, int64_t panels, int64_t k_pad, const std::byte* a,
           const std::byte* b, int64_t b_panel_bytes, const Target& to) {
  const int nr = job.table->nr;
  const TileFn* fns = job.bf16_product ? job.table->tile_bf16 : job.table->tile_f32;
  TileArgs t = {};
  t.k = k_pad;
  t.in_stride = to.in_stride;
  t.out_stride = to.out_stride;
  t.out_bf16 = to.out_bf16;
  const int64_t a_row_bytes = k_pad * (job.a_panel_bf16() ? 2 : 4), out_bytes = to.out_bf16 ? 2 : 4;
  for (int64_t n = 0; n < cols.end - cols.begin; n += nr, b += b_panel_bytes) {
    t.b = b;
    t.n = static_cast<int>(std::min<int64_t>(nr, cols.end - cols.begin - n));
    const std::byte* panel = a;
    for (int64_t i = 0; i < panels; ++i) {
      const Range r = part(rows.end - rows.begin, panels, i);
      t.a = panel;
      t.in = to.in == nullptr ? nullptr : to.in + r.begin * to.in_stride + n;
      t.out = to.out + (r.begin * to.out_stride + n) * out_bytes;
      fns[r.end - r.begin](t);
      panel += a_row_bytes * panel_rows(job, r.end - r.begin);
    }
  }
}

void run_share(const Job& job, Range rows, Range cols, const GemmContext::Scratch& scratch) {
  const int64_t k_blocks = ceil_div(job.k, job.kc);
  const bool partial = job.c.dtype == DType::bf16 && k_blocks > 1;
  const bool pack = job.packed == nullptr;
  int64_t nc = cols.end - cols.begin;
  if (pack) nc = std::min(nc, job.column_block());
  if (partial) nc = std::min(nc, kPartialColumns);
  const int64_t band = partial ? kPartialRows : rows.end - rows.begin;
  const int64_t mc = kRowBlock / job.mr() * job.mr();
  for (int64_t n0 = cols.begin; n0 < cols.end; n0 += nc) {
    const Range block_cols = {n0, std::min(n0 + nc, cols.end)};
    for (int64_t m0 = rows.begin; m0 < rows.end; m0 += band) {
      const int64_t m1 = std::min(m0 + band, rows.end);
      for (int64_t kb = 0; kb < k_blocks; ++kb) {
        const int64_t k0 = kb * job.kc, k_len = std::min(job.kc, job.k - k0);
        const int64_t k_pad = round_up(k_len, job.k_unit());
        const std::byte* b;
        if (pack) {
          pack_b(job, block_cols, k0, k_len, k_pad, static_cast<std::byte*>(scratch.b));
          b = static_cast<const std::byte*>(scratch.b);
        } else {
          b = job.packed + n0 / job.table->nr * job.b_bytes(job.panel_k) + job.b_bytes(k0);
        }
        const int64_t row_blocks = ceil_div(m1 - m0, mc);
        for (int64_t i = 0; i < row_blocks; ++i) {
          const Range r = part(m1 - m0, row_blocks, i), block_rows = {m0 + r.begin, m0 + r.end};
          const int64_t panels = ceil_div(r.end - r.begin, job.mr());
          pack_a(job, block_rows, panels, k0, k_len, k_pad, static_cast<std::byte*>(scratch.a));
          Target to = {};
          std::byte* c = static_cast<std::byte*>(job.c.data) +
                         (block_rows.begin * job.c.stride + n0) * dtype_bytes(job.c.dtype);
          float* sums = partial ? scratch.c + r.begin * kPartialColumns : reinterpret_cast<float*>(c);
          const int64_t sums_stride = partial ? kPartialColumns : job.c.stride;
          if (kb > 0 || job.add) to.in = sums;
          to.in_stride = sums_stride;
          const bool to_c = !partial || kb + 1 == k_blocks;
          to.out = to_c ? c : reinterpret_cast<std::byte*>(sums);
          to.out_stride = to_c ? job.c.stride : sums_stride;
          to.out_bf16 = to_c && job.c.dtype == DType::bf16;
          tiles(job, block_rows, block_cols, panels, k_pad, static_cast<const std::byte*>(scratch.a), b,
                job.b_bytes(pack ? k_pad : job.panel_k), to);
        }
      }
    }
  }
}

// Cuts C into a grid of shares, one a thread: the cheapest by a rough count of cycles (the bits do not depend on it).
void choose_grid(Job& job, int threads) {
  const double k = static_cast<double>(job.k);
  const double bytes = static_cast<double>(job.m + job.n) * k * 2;
  const double flops = 2.0 * static_cast<double>(job.m) * static_cast<double>(job.n) * k;
  job.tm = job.tn = 1;
  if (flops < 2e6 && bytes < 4e5) return;  // less work than waking a thread
  double best = -1;
  const int64_t m_units = ceil_div(job.m, job.mr()), n_units = ceil_div(job.n, job.table->nr);
  for (int used = threads; used >= 1; --used)
    for (int tm = 1; tm <= used; ++tm) {
      if (used % tm != 0) continue;
      const int tn = used / tm;
      const double rows = static_cast<double>(ceil_div(m_units, tm) * job.mr());
      const double cols = static_cast<double>(ceil_div(n_units, tn) * job.table->nr);
      const double a_packs = job.packed == nullptr ? std::ceil(cols / static_cast<double>(job.column_block())) : 1;
      const double cost = rows * cols / 16 + rows * a_packs + cols * (job.packed == nullptr ? 1.0 : 0.3);
      if (best < 0 || cost < best) {
        best = cost;
        job.tm = tm;
        job.tn = tn;
      }
    }
}

void run_grid_cell(const Job& job, int64_t cell, int thread) {
  const int64_t n_units = ceil_div(job.n, job.table->nr);
  const Range rows = part(job.m, job.tm, cell / job.tn);
  Range cols = part(n_units, job.tn, cell % job.tn);
  cols = {cols.begin * job.table->nr, std::min(cols.end * job.table->nr, job.n)};
  if (rows.begin >= rows.end || cols.begin >= cols.end) return;
  job.table->enter();
  run_share(job, rows, cols, job.ctx->scratch(thread));
  job.table->leave();
}

void check_ref(const MatRef& m, int64_t rows, int64_t cols, const char* name) {
  DS_ASSERT(m.dtype == DType::f32 || m.dtype == DType::bf16, "gemm: {} is {}", name, dtype_name(m.dtype));
  DS_ASSERT(rows <= 1 || m.stride >= cols, "gemm: {} [{}, {}] has row stride {}", name, rows, cols, m.stride);
}

void run(Job& job) {
  DS_ASSERT(job.m >= 0 && job.n >= 0 && job.k >= 0, "gemm: m {} n {} k {}", job.m, job.n, job.k);
  check_ref(MatRef{job.c.data, job.c.dtype, job.c.stride}, job.m, job.n, "C");
  DS_ASSERT(!job.add || job.c.dtype == DType::f32, "gemm: adding to C needs f32, not {}", dtype_name(job.c.dtype));
  if (job.m == 0 || job.n == 0) return;
  if (job.k == 0) {
    if (job.add) return;
    const int64_t row = dtype_bytes(job.c.dtype);
    for (int64_t i = 0; i < job.m; ++i)
      std::memset(static_cast<std::byte*>(job.c.data) + i * job.c.stride * row, 0, static_cast<size_t>(job.n * row));
    return;
  }
  job.bf16_product = job.b.dtype == DType::bf16;
  // K blocks of nearly equal length that fit the scratch; from K alone.
  const int64_t kc_max = kKBytes / (job.a_panel_bf16() ? 2 : 4);
  job.kc = round_up(ceil_div(job.k, ceil_div(job.k, kc_max)), 32);
  choose_grid(job, job.ctx->pool().size());
  const int64_t cells = job.tm * job.tn;
  if (cells == 1) return run_grid_cell(job, 0, 0);
  job.ctx->pool().parallel_for(cells, 1, [&job](int64_t begin, int64_t end, int thread) {
    for (int64_t cell = begin; cell < end; ++cell) run_grid_cell(job, cell, thread);
  });
}

Job make_job(GemmContext& ctx, const Kernel& kernel, int64_t m, int64_t n, int64_t k, const MatRef& a, const MatOut& c, bool add) {
  Job job = {};
  job.table = &kernel.table();
  job.m = m;
  job.n = n;
  job.k = k;
  job.a = a;
  job.c = c;
  job.add = add;
  job.ctx = &ctx;
  return job;
}

PackedB pack_all(GemmContext& ctx, int64_t n, int64_t k, const MatRef& w, Layout layout, void* memory) {
  DS_ASSERT(reinterpret_cast<uintptr_t>(memory) % 64 == 0, "pack_b: memory is not 64-byte aligned");
  check_ref(w, layout == Layout::rows ? n : k, layout == Layout::rows ? k : n, "B");
  const Kernel& kernel = ctx.kernel_of_weight(w.dtype, n, k);
  Job job = make_job(ctx, kernel, 0, n, k, w, {}, false);
  job.b = w;
  job.b_layout = layout;
  job.bf16_product = w.dtype == DType::bf16;
  const int64_t nr = job.table->nr, k_pad = round_up(k, job.k_unit());
  struct Task {
    const Job& job;
    std::byte* memory;
    int64_t n, k, k_pad, nr;
  };
  const Task task = {job, static_cast<std::byte*>(memory), n, k, k_pad, nr};
  ctx.pool().parallel_for(ceil_div(n, nr), 4, [&task](int64_t begin, int64_t end, int) {
    pack_b(task.job, {begin * task.nr, std::min(end * task.nr, task.n)}, 0, task.k, task.k_pad,
           task.memory + begin * task.job.b_bytes(task.k_pad), true);
  });
  return {memory, w.dtype, n, k, &kernel, k_pad};
}

}  // namespace

GemmContext::GemmContext(ThreadPool& pool, const Kernel& kernel, std::vector<KernelChoice> choices)
    : pool_(pool), kernel_(kernel), choices_(std::move(choices)),
      memory_(new std::byte[static_cast<size_t>(pool.size() * (kScratchA + kScratchB + kScratchC) + 64)]) {}

GemmContext::~GemmContext() = default;

const Kernel& GemmContext::kernel_of_weight(DType dtype, int64_t n, int64_t k) const {
  for (const KernelChoice& c : choices_)
    if (!c.gradient && c.dtype == dtype && c.n == n && c.k == k) return *c.kernel;
  return kernel_;
}

const Kernel& GemmContext::kernel_of_gradient(DType dtype, int64_t n) const {
  for (const KernelChoice& c : choices_)
    if (c.gradient && c.dtype == dtype && c.n == n) return *c.kernel;
  return kernel_;
}

GemmContext::Scratch GemmContext::scratch(int thread) const {
  const uintptr_t start = round_up(reinterpret_cast<uintptr_t>(memory_.get()), 64);
  std::byte* p = reinterpret_cast<std::byte*>(start) + thread * (kScratchA + kScratchB + kScratchC);
  return {p, p + kScratchA, reinterpret_cast<float*>(p + kScratchA + kScratchB)};
}

int64_t packed_b_bytes(const Kernel& kernel, DType dtype, int64_t n, int64_t k) {
  const GemmTable& t = kernel.table();
  const int64_t k_pad = round_up(k, dtype == DType::bf16 ? t.k_unit_bf16 : 1);
  return round_up(n, t.nr) * k_pad * dtype_bytes(dtype);
}

PackedB pack_b_nt(GemmContext& ctx, int64_t n, int64_t k, MatRef w, void* memory) {
  return pack_all(ctx, n, k, w, Layout::rows, memory);
}

PackedB pack_b_nn(GemmContext& ctx, int64_t n, int64_t k, MatRef w, void* memory) {
  return pack_all(ctx, n, k, w, Layout::cols, memory);
}

PackedB packed_prefix(const PackedB& b, int64_t k) {
  const int64_t unit = b.dtype == DType::bf16 ? b.kernel->table().k_unit_bf16 : 1;
  PackedB prefix = b;
  prefix.k = k;
  if (k > b.k || (k < b.k && k % unit != 0)) prefix.data = nullptr;  // the last unit would hold what lies behind
  return prefix;
}

void gemm_nt(GemmContext& ctx, int64_t m, int64_t n, int64_t k, MatRef a, MatRef b, MatOut c, bool add) {
  check_ref(a, m, k, "A");
  check_ref(b, n, k, "B");
  Job job = make_job(ctx, ctx.kernel(), m, n, k, a, c, add);
  job.b = b;
  run(job);
}

namespace {
void run_nn(GemmContext& ctx, const Kernel& kernel, int64_t m, int64_t n, int64_t k, const MatRef& a, const MatRef& b, const MatOut& c, bool add) {
  check_ref(a, m, k, "A");
  check_ref(b, k, n, "B");
  Job job = make_job(ctx, kernel, m, n, k, a, c, add);
  job.b = b;
  job.b_layout = Layout::cols;
  run(job);
}
}  // namespace

void gemm_nn(GemmContext& ctx, int64_t m, int64_t n, int64_t k, MatRef a, MatRef b, MatOut c, bool add) {
  run_nn(ctx, ctx.kernel(), m, n, k, a, b, c, add);
}

void gemm_weight_nn(GemmContext& ctx, int64_t m, int64_t n, int64_t k, MatRef a, MatRef b, MatOut c, bool add) {
  run_nn(ctx, ctx.kernel_of_weight(b.dtype, n, k), m, n, k, a, b, c, add);
}

void gemm_tn(GemmContext& ctx, int64_t m, int64_t n, int64_t k, MatRef a, MatRef b, MatOut c, bool add) {
  check_ref(a, k, m, "A");
  check_ref(b, k, n, "B");
  Job job = make_job(ctx, ctx.kernel_of_gradient(b.dtype, n), m, n, k, a, c, add);
  job.b = b;
  job.a_layout = job.b_layout = Layout::cols;
  run(job);
}

void gemm_packed(GemmContext& ctx, int64_t m, int64_t n, int64_t k, MatRef a, const PackedB& b, MatOut c, bool add) {
  check_ref(a, m, k, "A");
  DS_ASSERT(b.kernel != nullptr, "gemm: B was not packed");
  DS_ASSERT(b.n == n && b.k == k, "gemm: packed B is [{}, {}], expected [{}, {}]", b.k, b.n, k, n);
  Job job = make_job(ctx, *b.kernel, m, n, k, a, c, add);
  job.b.dtype = b.dtype;
  job.packed = static_cast<const std::byte*>(b.data);
  job.panel_k = b.panel_k;
  run(job);
}

}  // namespace dspark::model::cpu
