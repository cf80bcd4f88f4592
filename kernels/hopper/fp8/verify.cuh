// SPDX-License-Identifier: Apache-2.0
// The Hopper kernel for pools of fp8, query rows on the N side. Keys and values are on the M side, where an operand may
// come from registers: so tiles stay as they are in the pool, and whoever multiplies a fragment widens it, to fp16.
//
//   S^T [64 positions, rows] = K [64, 576] . Q^T      one warpgroup a tile, the two take turns
//   P                          softmax over positions, through shared memory as [rows, 64]
//   O^T [512, rows]         += V^T [512, 64] . P^T     each warpgroup holds 256 of the 512 dimensions, for every tile
//
// Fragments: ldmatrix of bytes gives a lane four neighbouring dimensions of a position, or, transposed, two dimensions
// of two positions. Q has the order of the former; sums come out in that of the latter, two neighbours a lane.
#pragma once

#include "device.cuh"
#include "hopper/block.cuh"
#include "hopper/fp8/loader.cuh"
#include "hopper/fp8/queries.cuh"
#include "hopper/fp8/shape.cuh"
#include "hopper/fp8/wgmma.cuh"
#include "hopper/output.cuh"
#include "hopper/ptx.cuh"
#include "hopper/shape.cuh"
#include "hopper/softmax.cuh"

namespace tv::hopper::fp8 {

// T: of the queries and the output. F: of the pool.
template <typename T, typename F, int kRows>
struct Group {
  using S = Shape<kRows>;
  using Half = __half;
  static constexpr int kN8 = kRows / 8;
  static constexpr int kMoves = 1, kUnsettled = 2;
  static constexpr int kAhead = kRows > 48 ? 3 : 4;     // loads of fragments that are under way
  static constexpr int kTogether = kRows > 48 ? 1 : 2;  // products
  static constexpr int kBuffers = 3;                    // times as many are under way, or about to be

  const TvVerifyParams& p;
  uint8_t* shared;
  uint32_t smem;
  int group;    // 0, 1: which warpgroup, and which half of the dimensions
  int current;  // which of the two reference arrays holds
  int warp, lane;
  uint32_t key_at, value_at;  // where the lane's rows of the first fragments lie in a tile
  float s[kN8][4];            // scores of this group's tile
  float o[kHalf][kN8][4];     // sums over all tiles

  __device__ __forceinline__ Group(const TvVerifyParams& p, uint8_t* shared, int group)
      : p(p), shared(shared), smem(smem_address(shared)), group(group), current(0) {
    warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
    key_at = smem + S::kTiles + tile_offset(16 * warp + lane % 16, lane / 16);
    value_at = smem + S::kTiles + tile_offset(lane, warp) + group * (kLatent / 2);
#pragma unroll
    for (int j = 0; j < kN8; ++j) sums(j) = {0, 0};
#pragma unroll
    for (int m = 0; m < kHalf; ++m) {
#pragma unroll
      for (int j = 0; j < kN8; ++j) o[m][j][0] = o[m][j][1] = o[m][j][2] = o[m][j][3] = 0;
    }
  }

  __device__ __forceinline__ const Job& job() const { return *reinterpret_cast<const Job*>(shared + S::kJob); }
  __device__ __forceinline__ void sync_group() const { sync_threads<kWarpgroup>(1 + group); }
  __device__ __forceinline__ float* reference(int which) const {
    return reinterpret_cast<float*>(shared + S::kReference) + which * kRows;
  }
  __device__ __forceinline__ float unit() const { return *reinterpret_cast<const float*>(shared + S::kUnit); }
  // Over this group's tiles and this lane's positions, of rows 8 j + 2 (lane % 4) and + 1. Not in registers: there are
  // too few.
  __device__ __forceinline__ float2& sums(int j) const {
    const int from = (threadIdx.x - kWarpgroup) / 4 * (kRows / 2) + lane % 4;
    return (reinterpret_cast<float2*>(shared + S::kSums) + from)[4 * j];
  }
  // What a tile did to the references: kMoves, kUnsettled (some row has seen nothing yet).
  __device__ __forceinline__ volatile int* moved(int t) const {
    return reinterpret_cast<volatile int*>(shared + S::kMoved) + (t & 1);
  }
  __device__ __forceinline__ uint32_t prob(int t) const { return smem + S::kProb + (t & 1) * S::kProbBytes; }
  __device__ __forceinline__ uint32_t prob_full(int t) const { return smem + S::kProbFull + 8 * (t & 1); }
  __device__ __forceinline__ static int stage(int t) { return unsigned(t) % S::kStages; }
  __device__ __forceinline__ void wait_for_third(int t, int third) const {
    barrier_wait(smem + S::kFull + 8 * (3 * stage(t) + third), unsigned(t) / S::kStages & 1);
  }

  // A product's operand of K, 16 positions and dimensions, from half of what a load gives.
  __device__ __forceinline__ static void widen_keys(const uint32_t* raw, uint32_t (&a)[4]) {
    halves_of(F(), raw[0], a[0], a[2]);
    halves_of(F(), raw[1], a[1], a[3]);
  }
  // Of V^T.
  __device__ __forceinline__ static void widen_values(const uint32_t* raw, uint32_t (&a)[4]) {
    halves_of(F(), __byte_perm(raw[0], 0, 0x3120), a[0], a[1]);
    halves_of(F(), __byte_perm(raw[1], 0, 0x3120), a[2], a[3]);
  }

  // Runs kCount products. load(i, raw) asks for fragments of products 2 i and 2 i + 1, widen(raw, a) makes an operand
  // of half of them, multiply(i, a) issues a product. kAhead loads are under way; kTogether products go and end
  // together, and operands are written again once the products with them have ended. (No wait before the first of them,
  // nor sums set to zero: ptxas would let all products wait for each other.)
  template <int kCount, typename Load, typename Widen, typename Multiply>
  __device__ __forceinline__ static void pipeline(Load load, Widen widen, Multiply multiply) {
    uint32_t raw[kAhead][4], a[kBuffers * kTogether][4];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(i, raw[i]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      uint32_t (&operand)[4] = a[i % (kBuffers * kTogether)];
      if (i >= kBuffers * kTogether && i % kTogether == 0) wgmma_wait<kBuffers - 1>();
      widen(raw[i / 2 % kAhead] + i % 2 * 2, operand);
      if (i % 2 && i / 2 + kAhead < kCount / 2) load(i / 2 + kAhead, raw[i / 2 % kAhead]);
      if (i % kTogether < kTogether - 1) continue;
      wgmma_fence();
#pragma unroll
      for (int k = i - kTogether + 1; k <= i; ++k) multiply(k, a[k % (kBuffers * kTogether)]);
      wgmma_commit();
    }
  }

  // Scores of tile t, each third as it lands. Products may still be under way.
  __device__ __forceinline__ void score(int t) {
    const uint32_t from = key_at + stage(t) * kTileBytes;
    constexpr int kLoads = kKeyDim / 32;
    pipeline<2 * kLoads>(
        [&](int i, uint32_t (&raw)[4]) {
          if (i % (kLoads / 3) == 0) wait_for_third(t, i / (kLoads / 3));
          ldmatrix_x4(raw, (from ^ (i % 2 * 32)) + i / 2 * 64);
        },
        [](const uint32_t* raw, uint32_t (&a)[4]) { widen_keys(raw, a); },
        [&](int i, const uint32_t (&a)[4]) {
          WgmmaFragment<kRows>::run(s, a, descriptor(smem + i / 4 * S::kQPanelBytes + i % 4 * 32), i > 0);
        });
  }

  // This group's half of P . V of tile t, and gives back what it read. Products may still be under way.
  __device__ __forceinline__ void multiply_values(int t) {
    const uint32_t from = value_at + stage(t) * kTileBytes;
    pipeline<4 * kHalf>(
        [&](int i, uint32_t (&raw)[4]) { ldmatrix_x4_trans(raw, from + i / 2 * 64 + i % 2 * 32 * kRowBytes); },
        [](const uint32_t* raw, uint32_t (&a)[4]) { widen_values(raw, a); },
        [&](int i, const uint32_t (&a)[4]) {
          WgmmaFragment<kRows>::run(o[i / 4], a, descriptor(prob(t) + i % 4 * 32), true);
        });
    if (lane == 0) barrier_arrive(smem + S::kFree + 8 * (S::kParts * stage(t) + group));
  }

  // Moves the references where a logit of this tile has outgrown them. The exponents s follow, and so do the sums.
  __device__ __forceinline__ int move_references(int t, float* maxima) {
    const int i = threadIdx.x % kWarpgroup;
    const float* before = reference(current);
    float* after = reference(current ^ 1);
    partial_maxima(s, maxima, warp, lane);
    sync_group();
    bool unsettled = false;
    if (i < kRows) {
      float top = maxima[i];
#pragma unroll
      for (int k = 1; k < S::kMaxima; ++k) top = fmaxf(top, maxima[k * kRows + i]);
      after[i] = next_reference(before[i], top, kProbLog2);
      unsettled = after[i] == -INFINITY;
    }
    unsettled = sync_threads_or<kWarpgroup>(1 + group, unsettled);
    move_exponents(before, after, lane, s);
    follow_references(t);
    return unsettled ? kMoves | kUnsettled : kMoves;
  }

  // The references have moved with tile t: so do the sums over the tiles before.
  __device__ __forceinline__ void follow_references(int t) {
    wgmma_wait<0>();  // the compiler wants no product in flight where it touches sums
    if (t > 0) rescale(reference(current), reference(current ^ 1));
    current ^= 1;
  }

  // Bits of the positions of this group's tile that each row sees.
  __device__ __forceinline__ uint64_t* visible() const {
    return reinterpret_cast<uint64_t*>(shared + S::kVisible) + group * kRows;
  }

  // Softmax of this group's tile t, from s to P in shared memory. P of tile t - 2 has been read: by this group, and by
  // the other one before it published P of tile t - 1.
  __device__ __forceinline__ void softmax(int t, bool masked) {
    uint8_t* scratch = shared + S::kProb + (t & 1) * S::kProbBytes;
    to_exponents(p, reference(current), lane, s, unit() * p.k_scale);
    if (masked) {
      sync_group();
      hide(s, reinterpret_cast<const uint32_t*>(visible()), warp, lane);
    }
    const bool unsettled = t == 0 || (*moved(t - 1) & kUnsettled);
    const bool moves = sync_threads_or<kWarpgroup>(1 + group, largest(s) > kLazyRescale + kProbLog2 || unsettled);
    const int news = moves ? move_references(t, reinterpret_cast<float*>(scratch)) : 0;
    uint32_t packed[kN8][2];
    exponentials(packed);
    store_prob(packed, prob(t), warp, lane);
    if (threadIdx.x % kWarpgroup == 0) *moved(t) = news;
    fence_async_reads();
    barrier_arrive(prob_full(t));
  }

  // Exponents to P, rounded and packed in pairs of rows; what is summed is what is multiplied.
  __device__ __forceinline__ void exponentials(uint32_t (&packed)[kN8][2]) const {
#pragma unroll
    for (int j = 0; j < kN8; ++j) {
      packed[j][0] = pack2(Half(), exp2_approx(s[j][0]), exp2_approx(s[j][1]));
      packed[j][1] = pack2(Half(), exp2_approx(s[j][2]), exp2_approx(s[j][3]));
      const float2 a = unpack2(Half(), packed[j][0]), b = unpack2(Half(), packed[j][1]), sum = sums(j);
      sums(j) = {sum.x + (a.x + b.x), sum.y + (a.y + b.y)};
    }
  }

  __device__ __forceinline__ void rescale(const float* before, const float* after) {
#pragma unroll
    for (int j = 0; j < kN8; ++j) {
      float by[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = 8 * j + 2 * (lane % 4) + c;
        by[c] = before[row] == after[row] ? 1 : exp2_approx(before[row] - after[row]);
#pragma unroll
        for (int m = 0; m < kHalf; ++m) o[m][j][c] *= by[c], o[m][j][c + 2] *= by[c];
      }
      const float2 sum = sums(j);
      sums(j) = {sum.x * by[0], sum.y * by[1]};
    }
  }

  // This group's part in tile t of the other.
  __device__ __forceinline__ void follow(int t) {
    barrier_wait(prob_full(t), t >> 1 & 1);
    if (*moved(t) & kMoves) follow_references(t);
    multiply_values(t);
  }

  // Tiles go in pairs, one for each group: while one has its softmax, the other multiplies.
  __device__ __forceinline__ void run() {
    const int begin = job().begin, i = threadIdx.x % kWarpgroup;
    const int tiles = uniform(ceil_div(job().end - begin, kTile));
    const int unmasked = (min(job().end, job().prefix) - begin) / kTile;  // tiles before the end and the draft
    barrier_wait(smem + S::kQueryFull, 0);
    int t = group;
#pragma unroll 1
    for (; t < tiles; t += 2) {
      if (t >= unmasked && i < kRows) {
        visible()[i] = visible_bits(p, job(), i, blockIdx.x * kRows + i, begin + t * kTile);
      }
      score(t);
      if (t > 0) follow(t - 1);
      wgmma_wait<0>();
      softmax(t, t >= unmasked);
      barrier_wait(prob_full(t), t >> 1 & 1);
      multiply_values(t);
      wgmma_wait<0>();
    }
    if (t == tiles && t > 0) follow(t - 1);  // the last tile was the other group's
    add_sums();
    wgmma_wait<0>();
  }

  // The rows' sums over both groups' tiles. Their inverses come where Q was: all threads have seen P of the last tile,
  // so nobody scores any more.
  __device__ __forceinline__ void add_sums() {
    const int i = threadIdx.x - kWarpgroup, slot = job().slot;
    const float* partial = reinterpret_cast<const float*>(shared + S::kSums);
    sync_threads<2 * kWarpgroup>(3);
    if (i / 32 < (2 * kRows + 31) / 32) {  // two threads a row
      const int row = min(i / 2, kRows - 1);
      float total = 0;
#pragma unroll 8
      for (int k = i % 2; k < S::kSumGroups; k += 2) total += partial[k * kRows + row];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      inverse()[row] = total > 0 ? __frcp_rn(total) * p.k_scale : 0;
      if (slot >= 0 && i / 2 < job().rows && i % 2 == 0) {
        *Workspace(p).partial_lse(slot, blockIdx.x * kRows + row) =
            total > 0 ? reference(current)[row] + __log2f(total) : -INFINITY;
      }
    }
    sync_threads<2 * kWarpgroup>(3);
  }
  __device__ __forceinline__ float* inverse() const { return reinterpret_cast<float*>(shared + S::kInverse); }

  // Normalises and writes the rows.
  __device__ __forceinline__ void finish() {
    const int row0 = blockIdx.x * kRows, slot = job().slot, rows = job().rows;
    const int row = 2 * (lane % 4), dim = group * (kLatent / 2) + warp * 16 + lane / 4 * 2;
    if (slot >= 0) {
      // Straight to the workspace: eight lanes fill two sectors of 32 bytes.
      float* dst = Workspace(p).partial(slot, row0 + row) + dim;
      each_row<kLatent>([&](int at, int i, float2 v) {
        if (row + i < rows) __stcg(reinterpret_cast<float2*>(dst + at), v);
      });
      return;
    }
    // Through shared memory, so that stores are whole lines, once nobody multiplies any more.
    sync_threads<2 * kWarpgroup>(3);
    float* dst = reinterpret_cast<float*>(shared + S::kOutRows) + row * S::kOutStride + dim;
    each_row<S::kOutStride>([&](int at, int, float2 v) { *reinterpret_cast<float2*>(dst + at) = v; });
    write_rows<T, S::kOutStride>(p, job(), row0, shared + S::kOutRows);
  }

  // Calls write(offset, row, values) for all sums of this thread, normalised, two neighbouring dimensions at once: rows
  // and offsets from its first one, where rows lie kStride apart.
  template <int kStride, typename Write>
  __device__ __forceinline__ void each_row(Write write) {
#pragma unroll
    for (int j = 0; j < kN8; ++j) {
      const float2 scale = *reinterpret_cast<const float2*>(inverse() + 8 * j + 2 * (lane % 4));
#pragma unroll
      for (int m = 0; m < kHalf; ++m) {
        const int at = 8 * j * kStride + m * 64;
        write(at, 8 * j, {o[m][j][0] * scale.x, o[m][j][2] * scale.x});
        write(at + kStride, 8 * j + 1, {o[m][j][1] * scale.y, o[m][j][3] * scale.y});
      }
    }
  }
};

// T: of the queries and the output. F: of the pool.
template <typename T, typename F, int kRows>
struct Math {
  using S = Shape<kRows>;
  using Queries = fp8::Queries<T, S>;
  struct Loads {
    using First = TwoTiles;
    static constexpr int kRegisters = kLoaderRegisters;
    __device__ __forceinline__ static void run(const TvVerifyParams& p, const Request& req, Range range, First first,
                                               uint32_t smem) {
      load<S>(p, req, range, first, smem);
    }
  };

  __device__ __forceinline__ static void work(const TvVerifyParams& p, uint8_t* shared, int group) {
    Group<T, F, kRows> math(p, shared, group);
    math.run();
    math.finish();
  }
};

}  // namespace tv::hopper::fp8
