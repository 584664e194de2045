/* Which experts a token visits, and with what weights (report sections 2.3.1 and 2.3.3), for code inside this library. */
#pragma once

#include <cstdint>

namespace gnomon {

struct Pool;

/* What a router's configuration says. Of `groups` equal groups of experts only the `kept_groups` strongest can be chosen from; the
 * strength of a group is the sum of its two largest biased scores. One group keeps all. */
struct Choice {
    int64_t experts, k, groups, kept_groups;
    bool renormalise; /* divide the chosen scores by their sum + 1e-20 */
    float scaling;
};

/* From logits [rows, experts] (fp32) and the selection bias [experts]: ids [rows, k], the k largest of sigmoid(logit) + bias, largest
 * first and of equal ones the lowest index first, and weights [rows, k] from the scores without the bias. Not a number counts as the
 * largest value, so it reaches the weights. A row's result depends on its own logits alone: the same bits for any number of rows and
 * threads. */
void route(Pool& pool, const Choice& choice, const float* logits, int64_t rows, const float* bias, int32_t* ids, float* weights);

}  // namespace gnomon
