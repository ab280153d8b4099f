// Scales as a BLAS library wants them. `out`, dense with rows of `ld` floats, becomes the strided matrix `in`
// [rows, cols] with each row padded to `ld` by ones: a stride of 0 repeats a scale, exchanged strides transpose.
// All blocks share the work; rows 0 are none. The caller owes: ld >= cols.
#pragma once

template <int THREADS>
struct Arrangement {
    const float* in;
    float* out;
    long long row_stride, col_stride;
    int rows, cols, ld;

    DEVICE void run() const {
        const long long count = (long long)rows * ld;
        const long long step = (long long)grid_x() * THREADS;
        for (long long i = (long long)block_x() * THREADS + thread_x(); i < count; i += step) {
            const long long row = i / ld;
            const long long col = i - row * ld;
            out[i] = col < cols ? in[row * row_stride + col * col_stride] : 1.0f;
        }
    }
};

// The whole kernel: up to three arrangements, `count` 16-bit numbers copied as they are, and, where `number` is given,
// its reciprocal.
template <int THREADS>
DEVICE void arrange(const Arrangement<THREADS>& first, const Arrangement<THREADS>& second,
                    const Arrangement<THREADS>& third, const unsigned short* halves, unsigned short* copy, int count,
                    const float* number, float* reciprocal) {
    grid_dependency_launch();
    grid_dependency_wait();
    first.run();
    second.run();
    third.run();
    for (int i = block_x() * THREADS + thread_x(); i < count; i += grid_x() * THREADS) copy[i] = halves[i];
    if (number != nullptr && block_x() == 0 && thread_x() == 0) *reciprocal = reciprocal_exact(*number);
}
