// Copies scales into the layout that a BLAS library takes: the strided matrix `in` [rows, cols] into `out`, dense with
// rows of `ld` floats, padded with ones. A stride of 0 repeats a scale; exchanged strides transpose. All blocks divide
// the work. With rows 0 there is nothing to copy. The caller owes: ld >= cols.
#pragma once

template <int THREADS>
struct Relayout {
    const float* in;
    float* out;
    long long row_stride, col_stride;
    int rows, cols, ld;

    DEVICE void run() const {
        const word64 count = static_cast<word64>(rows) * ld, threads = static_cast<word64>(grid_x()) * THREADS;
        for (word64 i = static_cast<word64>(block_x()) * THREADS + thread_x(); i < count; i += threads) {
            const long long row = static_cast<long long>(i / ld), col = static_cast<long long>(i) - row * ld;
            out[i] = col < cols ? in[row * row_stride + col * col_stride] : 1.0f;
        }
    }
};

// Copies `count` 16-bit numbers, 16 bytes at a time if both addresses are aligned to 16.
template <int THREADS>
DEVICE void copy_halves(const unsigned short* in, unsigned short* out, int count) {
    const int thread = block_x() * THREADS + thread_x(), threads = grid_x() * THREADS;
    const bool whole = ((unsigned long long)in | (unsigned long long)out) % 16 == 0;
    const int vectors = whole ? count / 8 : 0;
    for (int i = thread; i < vectors; i += threads) store16(out + 8 * i, load16(in + 8 * i));
    for (int i = 8 * vectors + thread; i < count; i += threads) out[i] = in[i];
}

// The whole kernel: copies up to two matrices of scales and `count` 16-bit numbers, and stores the reciprocal of
// `number` if there is one.
template <int THREADS>
DEVICE void relayout_all(const Relayout<THREADS>& first, const Relayout<THREADS>& second, const unsigned short* halves,
                         unsigned short* copy, int count, const float* number, float* reciprocal) {
    grid_dependency_launch();
    grid_dependency_wait();
    first.run();
    second.run();
    copy_halves<THREADS>(halves, copy, count);
    if (number != nullptr && block_x() == 0 && thread_x() == 0) *reciprocal = reciprocal_exact(*number);
}

// clang-format off: a row of parameters for each matrix
KERNEL(256)
relayout(const float* in0, float* out0, long long row0, long long col0, int rows0, int cols0, int ld0,
         const float* in1, float* out1, long long row1, long long col1, int rows1, int cols1, int ld1,
         const unsigned short* halves, unsigned short* copy, int halves_count, const float* number,
         float* reciprocal) {
    // clang-format on
    relayout_all<256>({in0, out0, row0, col0, rows0, cols0, ld0}, {in1, out1, row1, col1, rows1, cols1, ld1}, halves,
                      copy, halves_count, number, reciprocal);
}
