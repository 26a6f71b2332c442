#include "banks.h"

namespace simt {

void BankCounter::count(const char* operation, Site site, int thread, uint32_t offset, int bytes) {
    std::vector<WarpLog>& warps = place(operation, site).warps;
    const size_t warp = thread / WARP_SIZE, lane = thread % WARP_SIZE;
    if (warp >= warps.size()) warps.resize(warp + 1);
    std::vector<WarpAccess>& accesses = warps[warp].accesses;
    const uint32_t n = warps[warp].executed[lane]++;
    if (n == accesses.size()) accesses.emplace_back(bytes);
    accesses[n].offsets[lane] = offset;
}

void BankCounter::end_block() {
    for (Place& place : all_places) {
        for (const WarpLog& warp : place.warps) {
            for (const WarpAccess& access : warp.accesses) evaluate(place, access);
        }
        place.warps.clear();
    }
}

void BankCounter::add(const BankCounter& other) {
    for (const Place& theirs : other.all_places) {
        Place& mine = place(theirs.operation, theirs.site);
        mine.accesses += theirs.accesses;
        mine.ideal += theirs.ideal;
        mine.wavefronts += theirs.wavefronts;
    }
}

BankCounter::Place& BankCounter::place(const char* operation, Site site) {
    for (Place& place : all_places) {
        if (place.operation == operation && place.site == site) return place;
    }
    all_places.push_back({operation, site});
    return all_places.back();
}

void BankCounter::evaluate(Place& place, const WarpAccess& access) {
    const int phase_lanes = NUM_BANKS * WORD_BYTES / access.lane_bytes;
    ++place.accesses;
    for (int lane = 0; lane < WARP_SIZE; lane += phase_lanes) {
        const int wavefronts = count_wavefronts(access, lane, phase_lanes);
        place.ideal += wavefronts > 0;
        place.wavefronts += wavefronts;
    }
}

int BankCounter::count_wavefronts(const WarpAccess& access, int first_lane, int num_lanes) {
    uint32_t words[NUM_BANKS];
    int num_words = 0, wavefronts = 0;
    int wanted[NUM_BANKS] = {};  // distinct words of each bank
    for (int lane = first_lane; lane < first_lane + num_lanes; ++lane) {
        if (access.offsets[lane] == WarpAccess::NONE) continue;
        for (int i = 0; i < access.lane_bytes / WORD_BYTES; ++i) {
            const uint32_t word = access.offsets[lane] / WORD_BYTES + i;
            bool known = false;
            for (int j = 0; j < num_words; ++j) known |= words[j] == word;
            if (known) continue;
            words[num_words++] = word;
            const int bank_words = ++wanted[word % NUM_BANKS];
            if (bank_words > wavefronts) wavefronts = bank_words;
        }
    }
    return wavefronts;
}

}  // namespace simt
