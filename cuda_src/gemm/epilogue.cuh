// From an fp32 accumulator to a result: value = scale_a * (scale_b * acc) + bias, in fp32; out = round(value), or, for
// FP8, encode(value * RN(1 / out_scale)). amax takes the largest |value|, NaN aside: it has to be 0 before the launch.
#pragma once
#include "../common/values.cuh"

// What comes behind the accumulator. OUT: the type of a wide result, 3 + FORMAT for FP8; BIAS: a type, -1 for none.
template <int OUT, int BIAS>
struct Epilogue {
    const void* bias;
    float reciprocal;

    DEVICE Epilogue(const void* bias, const float* out_scale) : bias(bias), reciprocal(1.0f) {
        if (OUT >= 3 && out_scale != nullptr) reciprocal = reciprocal_exact(*out_scale);
    }

    DEVICE float value(float acc, float scale_a, float scale_b, int column) const {
        const float scaled = scale_a * (scale_b * acc);
        if constexpr (BIAS < 0) return scaled;
        else return scaled + load_element<BIAS>(bias, column);
    }

    DEVICE void store(void* out, long long index, float value) const {
        if constexpr (OUT >= 3) static_cast<byte*>(out)[index] = encode<OUT - 3>(value * reciprocal);
        else store_element<OUT>(out, index, value);
    }
};

// One atomic a warp. Numbers that are not negative are ordered as their bits are.
DEVICE void publish_amax(float amax, float* result) {
    const unsigned largest = warp_max(bits_of(amax));
    if (lane() == 0) atomic_max(reinterpret_cast<unsigned*>(result), largest);
}

// A block takes THREADS * EPILOGUE_COLUMNS columns of the rows block_x() / column_tiles, + grid_x() / column_tiles, ...
constexpr int EPILOGUE_COLUMNS = 4;

template <int OUT, int BIAS, int AMAX, int THREADS>
DEVICE void apply_epilogue(const float* acc, const float* scale_a, long long scale_a_stride, const float* scale_b,
                           long long scale_b_stride, const void* bias, void* out, long long out_stride,
                           const float* out_scale, float* amax, int m, int n, int column_tiles) {
    const int first = int(block_x() % column_tiles) * (THREADS * EPILOGUE_COLUMNS) + thread_x();
    const int row_step = grid_x() / column_tiles;
    grid_dependency_launch();
    grid_dependency_wait();
    const Epilogue<OUT, BIAS> finish(bias, out_scale);
    float largest = 0.0f;
    for (int row = block_x() / column_tiles; row < m; row += row_step) {
        const float across = scale_a[row * scale_a_stride];
#pragma unroll
        for (int i = 0; i < EPILOGUE_COLUMNS; ++i) {
            const int col = first + i * THREADS;
            if (col >= n) break;
            const float value =
                finish.value(acc[static_cast<long long>(row) * n + col], across, scale_b[col * scale_b_stride], col);
            finish.store(out, row * out_stride + col, value);
            if (AMAX) largest = maximum(largest, magnitude(value));
        }
    }
    if (AMAX) publish_amax(largest, amax);
}
