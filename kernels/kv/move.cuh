// SPDX-License-Identifier: Apache-2.0
// Moves rows of one buffer a block: slots into shared memory, all pieces of a tile into registers, then out.
#pragma once

#include "device.cuh"
#include "kv/cut.h"
#include "kv/params.h"

namespace tv::kv {

struct alignas(kPieceBytes) Piece {
  uint32_t words[4];
};

// The piece of a tile that a thread is at; from one of its pieces to the next is kThreads pieces.
struct Place {
  int row, column;

  __device__ __forceinline__ void step(int width) {
    row += kThreads / width, column += kThreads % width;
    if (column >= width) column -= width, ++row;
  }
};

// Where the entries of a tile lead, in bytes from row 0; -1: nowhere.
struct Offsets {
  int64_t from[kMaxGroup], to[kMaxGroup];

  __device__ __forceinline__ void load(const TvKvMoveParams& p, int first, int rows, int64_t row_bytes) {
    static_assert(kMaxGroup <= kThreads);
    const int i = threadIdx.x;
    if (i >= rows) return;
    const int64_t src = load_index(p.src, p.index_bytes, first + i);
    const int64_t dst = load_index(p.dst, p.index_bytes, first + i);
    const bool inside = src >= 0 && src < p.slots && dst >= 0 && dst < p.slots;
    from[i] = inside && src != dst ? src * row_bytes : -1;
    to[i] = dst * row_bytes;
  }
};

__device__ __forceinline__ void move_tile(uint8_t* base, const Offsets& at, int rows, int width) {
  const Place first = {int(threadIdx.x) / width, int(threadIdx.x) % width};
  Piece held[kHeld];
  Place place = first;
#pragma unroll
  for (int i = 0; i < kHeld; ++i, place.step(width)) {
    if (place.row < rows && at.from[place.row] >= 0) {
      held[i] = *reinterpret_cast<const Piece*>(base + at.from[place.row] + place.column * kPieceBytes);
    }
  }
  __syncthreads();  // all is read before anything is written
  place = first;
#pragma unroll
  for (int i = 0; i < kHeld; ++i, place.step(width)) {
    if (place.row < rows && at.from[place.row] >= 0) {
      *reinterpret_cast<Piece*>(base + at.to[place.row] + place.column * kPieceBytes) = held[i];
    }
  }
}

__device__ __forceinline__ void move_block(const TvKvMoveParams& p) {
  __shared__ Offsets at;
  const int64_t row_bytes = p.row_bytes[blockIdx.y];
  uint8_t* base = static_cast<uint8_t*>(p.bases[blockIdx.y]);
  const Cut tile = cut(row_bytes, p.group);
  const int entries = p.count == nullptr ? p.capacity : min(max(*p.count, 0), p.capacity);
  const int pieces = int(row_bytes / kPieceBytes), tiles = ceil_div(entries, tile.rows) * tile.across;
  for (int i = blockIdx.x; i < tiles; i += gridDim.x) {
    const int first = i / tile.across * tile.rows, rows = min(tile.rows, entries - first);
    const int column = i % tile.across * tile.width;
    __syncthreads();  // the tile before this one is written
    at.load(p, first, rows, row_bytes);
    __syncthreads();
    move_tile(base + column * kPieceBytes, at, rows, min(tile.width, pieces - column));
  }
}

}  // namespace tv::kv
