// Tiles for tensor cores: D [16, 8] += A [16, 16] B [16, 8], one warp each. Mma<bf16> is mma.m16n8k16 fed by ldmatrix; Mma<float>
// has the same fragments and the same interface in fp32 (lanes pass their elements around), so that a kernel written on Mma<T>
// can be checked at fp32's accuracy, where bf16's own error would hide a wrong mask.
//
// Which elements a lane holds (g = lane / 4, t = lane % 4): of C and D element i is (g + 8 (i / 2), 2 t + i % 2).
#pragma once

#include "cuda/device.h"

namespace dspark::cuda {

template <typename T>
struct Mma;

template <>
struct Mma<bf16> {
  struct A {
    uint32_t r[4];
  };
  struct B {
    uint32_t r[2];
  };
  // A(i, k) = s[(row + i) * pitch + col + k]. All tiles: rows 16-byte aligned.
  DS_DEVICE static void load_a(A& a, Shared<bf16> s, int row, int col, int pitch) {
    const int m = lane() / 8;
    ldmatrix4(a.r, s, (row + (m & 1) * 8 + lane() % 8) * pitch + col + (m >> 1) * 8);
  }
  // Two tiles side by side: B_j(k, n) = s[(row + 8 j + n) * pitch + col + k].
  DS_DEVICE static void load_b(B (&b)[2], Shared<bf16> s, int row, int col, int pitch) {
    const int m = lane() / 8;
    uint32_t r[4];
    ldmatrix4(r, s, (row + (m >> 1) * 8 + lane() % 8) * pitch + col + (m & 1) * 8);
    b[0].r[0] = r[0], b[0].r[1] = r[1], b[1].r[0] = r[2], b[1].r[1] = r[3];
  }
  // B_j(k, n) = s[(row + k) * pitch + col + 8 j + n].
  DS_DEVICE static void load_b_transposed(B (&b)[2], Shared<bf16> s, int row, int col, int pitch) {
    const int m = lane() / 8;
    uint32_t r[4];
    ldmatrix4_transposed(r, s, (row + (m & 1) * 8 + lane() % 8) * pitch + col + (m >> 1) * 8);
    b[0].r[0] = r[0], b[0].r[1] = r[1], b[1].r[0] = r[2], b[1].r[1] = r[3];
  }
  // A made of two C tiles side by side, rounded: a product's result as the next one's operand.
  DS_DEVICE static void from_c(A& a, const float (&left)[4], const float (&right)[4]) {
    a.r[0] = pair(left[0], left[1]), a.r[1] = pair(left[2], left[3]);
    a.r[2] = pair(right[0], right[1]), a.r[3] = pair(right[2], right[3]);
  }
  DS_DEVICE static void mma(float (&c)[4], const A& a, const B& b) { mma_bf16(c, a.r, b.r); }

 private:
  DS_DEVICE static uint32_t pair(float low, float high) { return narrow(low).bits | static_cast<uint32_t>(narrow(high).bits) << 16; }
};

template <>
struct Mma<float> {
  struct A {
    float v[8];  // register i of bf16's A holds v[2 i] and v[2 i + 1]
  };
  struct B {
    float v[4];
  };
  DS_DEVICE static void load_a(A& a, Shared<float> s, int row, int col, int pitch) {
    const int g = lane() / 4, t = lane() % 4;
    for (int i = 0; i < 8; ++i) a.v[i] = s[(row + g + 8 * (i / 2 % 2)) * pitch + col + 2 * t + 8 * (i / 4) + i % 2];
  }
  DS_DEVICE static void load_b(B (&b)[2], Shared<float> s, int row, int col, int pitch) {
    const int g = lane() / 4, t = lane() % 4;
    for (int j = 0; j < 2; ++j)
      for (int i = 0; i < 4; ++i) b[j].v[i] = s[(row + 8 * j + g) * pitch + col + 2 * t + 8 * (i / 2) + i % 2];
  }
  DS_DEVICE static void load_b_transposed(B (&b)[2], Shared<float> s, int row, int col, int pitch) {
    const int g = lane() / 4, t = lane() % 4;
    for (int j = 0; j < 2; ++j)
      for (int i = 0; i < 4; ++i) b[j].v[i] = s[(row + 2 * t + 8 * (i / 2) + i % 2) * pitch + col + 8 * j + g];
  }
  DS_DEVICE static void from_c(A& a, const float (&left)[4], const float (&right)[4]) {
    for (int i = 0; i < 4; ++i) a.v[i] = left[i], a.v[4 + i] = right[i];
  }
  // A(row, k) and B(k, col) come from the lanes that hold them, k ascending. Called, not inlined: what it is for is checking, and 64
  // shuffles in each of a kernel's products would keep the compiler busy for minutes.
  DS_DEVICE_CALL static void mma(float (&c)[4], const A& a, const B& b) {
    const int g = lane() / 4, t = lane() % 4;
    DS_UNROLL
    for (int k = 0; k < 16; ++k) {
      const int half = k / 8, pick = k % 8, owner = pick / 2, odd = pick % 2;
      const float top = shuffle(a.v[4 * half + odd], 4 * g + owner), bottom = shuffle(a.v[4 * half + 2 + odd], 4 * g + owner);
      const float left = shuffle(b.v[2 * half + odd], 4 * (2 * t) + owner), right = shuffle(b.v[2 * half + odd], 4 * (2 * t + 1) + owner);
      c[0] += top * left, c[1] += top * right, c[2] += bottom * left, c[3] += bottom * right;
    }
  }
};

}  // namespace dspark::cuda
