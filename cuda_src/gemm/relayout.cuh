// Scales as a BLAS library wants them. `out`, dense with rows of `ld` floats, becomes the strided matrix `in`
// [rows, cols] with each row padded to `ld` by ones: a stride of 0 repeats a scale, exchanged strides transpose.
// All blocks share the work; rows 0 are none. The caller owes: ld >= cols.
#pragma once

template <int THREADS>
struct Relayout {
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

// Copies `count` 16-bit numbers, 16 bytes at a time where both addresses are aligned to that.
template <int THREADS>
DEVICE void copy_halves(const unsigned short* in, unsigned short* out, int count) {
    const int thread = block_x() * THREADS + thread_x(), threads = grid_x() * THREADS;
    const bool whole = ((unsigned long long)in | (unsigned long long)out) % 16 == 0;
    const int vectors = whole ? count / 8 : 0;
    for (int i = thread; i < vectors; i += threads) store16(out + 8 * i, load16(in + 8 * i));
    for (int i = 8 * vectors + thread; i < count; i += threads) out[i] = in[i];
}

// The whole kernel: up to three matrices of scales, `count` 16-bit numbers copied as they are, and, where `number` is
// given, its reciprocal.
template <int THREADS>
DEVICE void relayout_all(const Relayout<THREADS>& first, const Relayout<THREADS>& second,
                    const Relayout<THREADS>& third, const unsigned short* halves, unsigned short* copy, int count,
                    const float* number, float* reciprocal) {
    grid_dependency_launch();
    grid_dependency_wait();
    first.run();
    second.run();
    third.run();
    copy_halves<THREADS>(halves, copy, count);
    if (number != nullptr && block_x() == 0 && thread_x() == 0) *reciprocal = reciprocal_exact(*number);
}
