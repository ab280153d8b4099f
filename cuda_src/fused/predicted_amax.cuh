// The largest |(h * r) * w| of a row, derived from the largest |h * w| as soon as the positive factor r is known.
//
// Each product and each value is rounded at most twice, with a relative error below 2**-22 in all. So the largest value
// belongs to the largest product, unless another product is within 2**-20 of it. In that case, and if something might
// overflow or underflow, nothing is predicted. Only h is kept with the product: w has so few bits that the rounded
// quotient of the two is w.
#pragma once
#include "../common/cluster_reduce.cuh"
#include "../common/values.cuh"

constexpr float NEAR_LARGEST = 1.0f - 0x1p-20f;
// Within these bounds h * r, (h * r) * w and their neighbours are normal numbers.
constexpr float MIN_H = 0x1p-90f, MAX_H = 0x1p60f, MIN_PRODUCT = 0x1p-60f, MAX_PRODUCT = 0x1p60f, MIN_FACTOR = 0x1p-30f,
                MAX_FACTOR = 0x1p30f;
constexpr unsigned INFINITE = 0x7f800000u;

// The largest product so far, its |h|, and the second largest product. NaN is ignored.
struct LargestProduct {
    float product = 0.0f, h = 0.0f, second = 0.0f;

    DEVICE void add(float h_signed, float w) {
        const float size = magnitude(h_signed), candidate = size * magnitude(w);
        second = maximum(second, minimum(product, candidate));
        h = candidate > product ? size : h;
        product = maximum(product, candidate);
    }
    // That of all lanes, in every lane; h is Inf if another product is near.
    DEVICE LargestProduct of_warp() const {
        const unsigned largest = warp_max(bits_of(product));
        const unsigned leader = warp_max(bits_of(product) == largest ? lane() + 1 : 0u) - 1;
        const float others = float_of(warp_max(bits_of(lane() == leader ? second : product)));
        const float found = shuffle_from(h, leader);
        return {float_of(largest), others < float_of(largest) * NEAR_LARGEST ? found : float_of(INFINITE), others};
    }
    // That of a team, from the words of its warps: their products, then their h.
    template <class Team>
    DEVICE static LargestProduct of_words(const unsigned* words) {
        const bool has = lane() < Team::WORDS;
        const float product = float_of(has ? words[lane()] : 0u);
        return LargestProduct{product, float_of(has ? words[Team::WORDS + lane()] : 0u), 0.0f}.of_warp();
    }
};

// The largest value, up to the factor r; W is the weights' type.
template <int W>
struct PredictedAmax {
    static constexpr bool POSSIBLE = true;
    float h, w;
    bool ordinary;

    DEVICE explicit PredictedAmax(const LargestProduct& all)
        : h(all.h),
          w(round_to<W>(all.product * reciprocal_ordinary(all.h))),
          ordinary(all.h >= MIN_H && all.h <= MAX_H && all.product >= MIN_PRODUCT && all.product <= MAX_PRODUCT) {}
    template <class Producer>
    DEVICE bool value(const Producer& producer, float& amax) const {
        const float r = producer.factor;
        amax = (h * r) * w;
        return ordinary && r >= MIN_FACTOR && r <= MAX_FACTOR;
    }
};

struct NoPrediction {
    static constexpr bool POSSIBLE = false;
    template <class Producer>
    DEVICE bool value(const Producer&, float&) const {
        return false;
    }
};
