// The common part of kernels that compute a row's values and quantize them in one launch: scales, codes, stores.
//
// A producer makes VECTOR values at a time: `load(col, cols, raw)` loads their inputs, and `values(raw, y)` computes
// them in fp32; past the row's end they have to be zeros. If raw is not kept, `store_inputs(col, cols, raw)` is called
// once per vector, when it is loaded for the last time. A block owns THREADS * VECTORS vectors of one row, and keeps
// them in registers from one pass to the next, or, with VECTORS 0, the whole row, which it loads again for each pass.
//
// MODE STATIC  y * RN(1 / scale), with given scales for groups of GROUP_ROWS x GROUP_COLS (-1 spans the axis)
//      TOKEN   y / scale, scale = max(min(amax, upper) / MAX, 1 / (MAX * 512)); the team owns the row
//      GROUP   y / scale, scale = max(amax, eps) / MAX of 1 x GROUP_COLS
// The caller owes: GROUP_COLS / VECTOR is a power of two up to WARP in GROUP, a whole number in STATIC.
#pragma once
#include "predicted_amax.cuh"
#include "scaled_codes.cuh"

// The codes and scales of a result, and the parameters of dynamic scales.
struct Destination {
    byte* data;
    long long data_stride;
    void* scale;
    long long scale_row_stride, scale_col_stride;
    const float* upper;  // may be null
    float upper_value, eps;
};

// Quantizes a block's part of a row, from first_col on. `load_given` is called after the wait for the preceding kernel,
// and before the first barrier.
template <class Producer, int FORMAT, int MODE, int GROUP_ROWS, int GROUP_COLS, int SCALE_FORMAT, int ALIGNED,
          int VECTORS, class Team, bool EARLY = false>
struct Quantizer {
    static constexpr int VECTOR = Producer::VECTOR, THREADS = Team::BLOCK_THREADS, UNROLLED = VECTORS > 0 ? VECTORS : 1;
    static constexpr bool IN_REGISTERS = VECTORS > 0, ONE_GIVEN = MODE == STATIC && GROUP_COLS < 0;
    using Raw = typename Producer::Raw;
    const Destination& to;
    // LANES of a group, which divide the work on the scales of EACH vectors at a time, in SHARES steps.
    static constexpr int LANES = MODE == GROUP ? GROUP_COLS / VECTOR : 1,
                         WISHED = power_of_two_from(UNROLLED < 4 ? UNROLLED : 4), EACH = WISHED <= LANES ? WISHED : 1,
                         SHARES = (UNROLLED + EACH - 1) / EACH;
    long long row, scale_row;
    int first_col, cols;
    float upper, given;

    DEVICE Quantizer(const Destination& to, long long row, int first_col, int cols)
        : to(to), row(row), first_col(first_col), cols(cols), upper(to.upper_value), given(0.0f) {
        scale_row = (GROUP_ROWS < 0 ? 0 : row / (GROUP_ROWS < 0 ? 1 : GROUP_ROWS)) * to.scale_row_stride;
    }
    DEVICE void load_given() {
        if (MODE == TOKEN && to.upper != nullptr) upper = minimum(upper, *to.upper);
        if constexpr (ONE_GIVEN) given = load_scale<SCALE_FORMAT>(to.scale, scale_row);
    }
    // EACH lanes store the scales of as many vectors, or, AT_ONCE, the first lane of a group those of all vectors.
    static constexpr bool AT_ONCE = EARLY && WARP_MAX_IS_FAST && 2 * LANES >= WARP && UNROLLED <= 4;
    static constexpr int STORES = AT_ONCE ? UNROLLED : SHARES;
    DEVICE static bool has_pass(int pass) { return !IN_REGISTERS || pass < VECTORS; }
    DEVICE int pass_of(int store) const { return AT_ONCE ? store : store * EACH + member(); }
    // Whether this lane stores a scale: decided by the group's first column, since this lane's own may be past the end
    // of the row if the group is cut.
    DEVICE bool stores_scale(int store) const {
        const int pass = pass_of(store), first_of_group = col_of(pass) / GROUP_COLS * GROUP_COLS;
        return member() < (AT_ONCE ? 1 : EACH) && has_pass(pass) && is_inside<ALIGNED>(first_of_group, cols);
    }
    DEVICE byte* scale_at(int store) const {
        const long long group = col_of(pass_of(store)) / GROUP_COLS;
        return static_cast<byte*>(to.scale) + (scale_row + group * to.scale_col_stride) * SCALE_BYTES<SCALE_FORMAT>;
    }
    // The addresses of the stores. EARLY: for so few rows that instructions between the last barrier and them count.
    byte *codes_to, *scales_to[STORES];
    DEVICE void prefetch_outputs() {
        codes_to = pin_register(codes_at(col_of(0)));
        if (is_inside<ALIGNED>(col_of(0), cols)) prefetch_to_l2(codes_to);
        if constexpr (MODE == GROUP) {
#pragma unroll
            for (int i = 0; i < STORES; ++i) {
                scales_to[i] = pin_register(stores_scale(i) ? scale_at(i) : nullptr);
                if (scales_to[i] != nullptr) prefetch_to_l2(scales_to[i]);
            }
        }
    }
    DEVICE void put_scale(int store, float scale) const {
        byte* const place = EARLY ? scales_to[store] : scale_at(store);
        if (EARLY ? place != nullptr : stores_scale(store)) store_scale<SCALE_FORMAT>(place, 0, scale);
    }
    DEVICE byte* codes_at(int col) const { return to.data + row * to.data_stride + col; }
    DEVICE int member() const { return int(lane()) % LANES; }

    DEVICE int passes() const {
        return IN_REGISTERS ? VECTORS : (cols - first_col + THREADS * VECTOR - 1) / (THREADS * VECTOR);
    }
    DEVICE int col_of(int pass) const { return first_col + (pass * THREADS + int(thread_x())) * VECTOR; }

    template <bool LAST = true>
    DEVICE void produce(const Producer& producer, const Raw* raw, int pass, float (&y)[VECTOR]) const {
        if constexpr (IN_REGISTERS) {
            producer.values(raw[pass], y);
        } else {
            Raw fetched;
            producer.load(col_of(pass), cols, fetched);
            if constexpr (LAST) producer.store_inputs(col_of(pass), cols, fetched);
            producer.values(fetched, y);
        }
    }
    template <int CAREFUL>
    DEVICE void finish(int pass, float (&y)[VECTOR], const Divisor& divisor) const {
        const int col = col_of(pass), valid = valid_at<ALIGNED, VECTOR>(col, cols);
        const auto codes = encode_scaled<FORMAT, MODE, SCALE_FORMAT, CAREFUL != 0>(y, divisor);
        byte* const place = EARLY ? codes_to + pass * (THREADS * VECTOR) : codes_at(col);
        if (is_inside<ALIGNED>(col, cols)) codes.template store_to<ALIGNED != UNALIGNED>(place, valid);
    }
    // Calls `rest(careful)`, where `careful` is a Constant.
    template <class Rest>
    DEVICE static void dispatch_careful(bool quick, const Rest& rest) {
        if (__builtin_expect(quick, 1)) rest(Constant<0>{});
        else rest(Constant<1>{});
    }

    // Prediction: the row's largest value, as far as it is known before the values are computed.
    template <class Prediction = NoPrediction>
    DEVICE void operator()(Team& team, const Producer& producer, const Raw* raw,
                           const Prediction& predicted = {}) const {
        if constexpr (MODE == TOKEN) token(team, producer, raw, predicted);
        else if constexpr (ONE_GIVEN) one_given(producer, raw);
        else if constexpr (MODE == STATIC) given_groups(producer, raw);
        else if constexpr (AT_ONCE) groups_at_once(producer, raw);
        else groups(producer, raw);
    }

    template <class Prediction>
    DEVICE void token(Team& team, const Producer& producer, const Raw* raw, const Prediction& predicted) const {
        float y[UNROLLED][VECTOR], amax = 0.0f;
        const int count = passes();
#pragma unroll UNROLLED
        for (int pass = 0; pass < count; ++pass) {
            float (&made)[VECTOR] = y[IN_REGISTERS ? pass : 0];
            produce<IN_REGISTERS>(producer, raw, pass, made);
            if (!Prediction::POSSIBLE) amax = maximum(amax, amax_of(made));
        }
        if (!predicted.value(producer, amax)) {
            if (Prediction::POSSIBLE) {
                amax = 0.0f;
#pragma unroll UNROLLED
                for (int pass = 0; pass < UNROLLED; ++pass) amax = maximum(amax, amax_of(y[pass]));
            }
            amax = float_of(row_max(team, bits_of(amax)));
        }
        Divisor divisor;
        const bool quick = ordinary_divisor<FORMAT, MODE, SCALE_FORMAT>(amax, 0.0f, divisor) && amax <= upper;
        dispatch_careful(quick, [&](auto careful) {
            constexpr int CAREFUL = decltype(careful)::VALUE;
            if (CAREFUL)
                divisor.scale = rounded_scale<SCALE_FORMAT>(scale_of<MODE, FORMAT>(bits_of(amax), upper, to.eps));
            if (first_col == 0 && thread_x() == 0) store_scale<SCALE_FORMAT>(to.scale, scale_row, divisor.scale);
#pragma unroll UNROLLED
            for (int pass = 0; pass < count; ++pass) {
                float (&made)[VECTOR] = y[IN_REGISTERS ? pass : 0];
                if (!IN_REGISTERS) produce(producer, raw, pass, made);
                finish<CAREFUL>(pass, made, divisor);
            }
        });
    }

    DEVICE void one_given(const Producer& producer, const Raw* raw) const {
        const Divisor divisor = prepared<MODE>(given);
        const int count = passes();
        dispatch_careful(divisor.ordinary, [&](auto careful) {
#pragma unroll UNROLLED
            for (int pass = 0; pass < count; ++pass) {
                float y[VECTOR];
                produce(producer, raw, pass, y);
                finish<decltype(careful)::VALUE>(pass, y, divisor);
            }
        });
    }

    DEVICE void given_groups(const Producer& producer, const Raw* raw) const {
        for (int begin = 0; begin < passes(); begin += UNROLLED) {
            Divisor divisors[UNROLLED];
            bool quick = true;
#pragma unroll
            for (int i = 0; i < UNROLLED; ++i) {
                const int col = col_of(begin + i);
                const long long scale_at = scale_row + col / GROUP_COLS * to.scale_col_stride;
                const bool inside = is_inside<ALIGNED>(col, cols);
                divisors[i] = prepared<MODE>(inside ? load_scale<SCALE_FORMAT>(to.scale, scale_at) : 1.0f);
                quick = quick && divisors[i].ordinary;
            }
            dispatch_careful(quick, [&](auto careful) {
#pragma unroll
                for (int i = 0; i < UNROLLED; ++i) {
                    float y[VECTOR];
                    produce(producer, raw, begin + i, y);
                    finish<decltype(careful)::VALUE>(begin + i, y, divisors[i]);
                }
            });
        }
    }

    // The lanes of a group divide the work on the scales of EACH vectors; then the warp takes one of two branches.
    DEVICE void groups(const Producer& producer, const Raw* raw) const {
        const int first = int(lane()) - member(), count = passes();
#pragma unroll SHARES
        for (int begin = 0; begin < count; begin += EACH) {
            float y[EACH][VECTOR];
            unsigned amax[EACH];
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (has_pass(begin + i)) produce(producer, raw, begin + i, y[i]);
                amax[i] = has_pass(begin + i) ? bits_of(amax_of(y[i])) : 0u;
            }
            const unsigned amax_bits = team_max_each<LANES>(amax);
            Divisor mine;
            const bool ordinary = ordinary_divisor<FORMAT, MODE, SCALE_FORMAT>(float_of(amax_bits), to.eps, mine);
            const bool quick = EACH == 1 ? ordinary : warp_all(ordinary);
            // A branch of its own: inside the one below it makes ptxas delay a norm's loads.
            if (__builtin_expect(!quick, 0))
                mine.scale = rounded_scale<SCALE_FORMAT>(scale_of<MODE, FORMAT>(amax_bits, 0.0f, to.eps));
            put_scale(begin / EACH, mine.scale);
            dispatch_careful(quick, [&](auto careful) {
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    const auto from = [&](float x) { return EACH == 1 ? x : shuffle_from(x, unsigned(first + i)); };
                    const Divisor divisor{from(mine.scale), from(mine.reciprocal), true};
                    if (has_pass(begin + i)) finish<decltype(careful)::VALUE>(begin + i, y[i], divisor);
                }
            });
        }
    }

    // The same if one instruction finds the maximum of a warp: each lane has the divisors of all its vectors at once.
    DEVICE void groups_at_once(const Producer& producer, const Raw* raw) const {
        float y[UNROLLED][VECTOR];
        float scales[UNROLLED], reciprocals[UNROLLED];
        unsigned amax[UNROLLED];
        bool ordinary = true;
#pragma unroll
        for (int i = 0; i < UNROLLED; ++i) {
            produce(producer, raw, i, y[i]);
            amax[i] = wide_team_max<LANES>(bits_of(amax_of(y[i])));
        }
#pragma unroll
        for (int i = 0; i < UNROLLED; ++i) {
            Divisor divisor;
            ordinary &= ordinary_divisor<FORMAT, MODE, SCALE_FORMAT>(float_of(amax[i]), to.eps, divisor);
            scales[i] = divisor.scale, reciprocals[i] = divisor.reciprocal;
        }
        const bool quick = warp_all(ordinary);
        if (__builtin_expect(!quick, 0)) {
#pragma unroll
            for (int i = 0; i < UNROLLED; ++i)
                scales[i] = rounded_scale<SCALE_FORMAT>(scale_of<MODE, FORMAT>(amax[i], 0.0f, to.eps));
        }
#pragma unroll
        for (int i = 0; i < UNROLLED; ++i) put_scale(i, scales[i]);
        dispatch_careful(quick, [&](auto careful) {
#pragma unroll
            for (int i = 0; i < UNROLLED; ++i)
                finish<decltype(careful)::VALUE>(i, y[i], Divisor{scales[i], reciprocals[i], true});
        });
    }
};
