#include "../platform.cuh"

KERNEL(1) clear_amax(float* amax) {
    grid_dependency_launch();
    grid_dependency_wait();
    *amax = 0.0f;
}
