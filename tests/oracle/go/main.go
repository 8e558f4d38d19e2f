// Program oracle answers, for generated clusters, what the structured allocator of Kubernetes decides.
//
// It reads one JSON object per line and writes one JSON object per line. A line is either a case (a cluster and the
// claims of one pod) or a list of CEL selectors with a device. Only the published packages of
// k8s.io/dynamic-resource-allocation are used, so every supported release builds from this file.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sort"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// searchTimeout is the limit of kube-scheduler for one node (DRASchedulerFilterTimeout).
const searchTimeout = 10 * time.Second

// celCacheSize holds every expression of a run; the size does not change results.
const celCacheSize = 10000

// question is one line of the input.
type question struct {
	// Features overrides single features; the others have their default of the release.
	Features json.RawMessage `json:"features,omitempty"`

	Nodes     []*v1.Node                   `json:"nodes,omitempty"`
	Slices    []*resourceapi.ResourceSlice `json:"slices,omitempty"`
	Classes   []*resourceapi.DeviceClass   `json:"classes,omitempty"`
	Allocated []*resourceapi.ResourceClaim `json:"allocated,omitempty"`
	Claims    []*resourceapi.ResourceClaim `json:"claims,omitempty"`

	// Expressions are evaluated on Device; with expressions, the line has no case.
	Expressions []string            `json:"expressions,omitempty"`
	Driver      string              `json:"driver,omitempty"`
	Device      *resourceapi.Device `json:"device,omitempty"`
}

// answer is one line of the output.
type answer struct {
	// Nodes has one entry per node of the case.
	Nodes map[string]nodeAnswer `json:"nodes,omitempty"`
	// Selected has, per expression of the case, the devices `pool/device` that it selects.
	Selected map[string][]string `json:"selected,omitempty"`
	// Evaluations has one entry per expression.
	Evaluations []evaluation `json:"evaluations,omitempty"`
	// Error reports a line that cannot be answered.
	Error string `json:"error,omitempty"`
}

// nodeAnswer has allocations if the claims fit on the node, and an error if the allocator reports one.
type nodeAnswer struct {
	Allocations []resourceapi.AllocationResult `json:"allocations,omitempty"`
	Error       string                         `json:"error,omitempty"`
}

// evaluation of one expression on one device.
type evaluation struct {
	Selected     bool   `json:"selected,omitempty"`
	CompileError string `json:"compileError,omitempty"`
	RuntimeError string `json:"runtimeError,omitempty"`
}

// classes is a lister of device classes.
type classes []*resourceapi.DeviceClass

func (c classes) List() ([]*resourceapi.DeviceClass, error) { return c, nil }

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	for _, class := range c {
		if class.Name == name {
			return class, nil
		}
	}
	return nil, fmt.Errorf("device class %q not found", name)
}

func main() {
	if err := run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "oracle:", err)
		os.Exit(1)
	}
}

func run(input io.Reader, output io.Writer) error {
	reader := bufio.NewReaderSize(input, 1<<20)
	writer := bufio.NewWriter(output)
	encoder := json.NewEncoder(writer)
	cache := cel.NewCache(celCacheSize, cel.Features{EnableConsumableCapacity: true})
	for {
		line, err := reader.ReadBytes('\n')
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read a question: %w", err)
		}
		if err := encoder.Encode(reply(line, cache)); err != nil {
			return fmt.Errorf("write an answer: %w", err)
		}
		if err := writer.Flush(); err != nil {
			return fmt.Errorf("write an answer: %w", err)
		}
	}
}

func reply(line []byte, cache *cel.Cache) answer {
	var asked question
	if err := json.Unmarshal(line, &asked); err != nil {
		return answer{Error: fmt.Sprintf("decode the question: %v", err)}
	}
	if asked.Expressions != nil {
		return answer{Evaluations: evaluateAll(&asked, cache)}
	}
	nodes, err := allocate(&asked, cache)
	if err != nil {
		return answer{Error: err.Error()}
	}
	return answer{Nodes: nodes, Selected: selected(&asked, cache)}
}

// allocate runs the allocator for each node.
func allocate(asked *question, cache *cel.Cache) (map[string]nodeAnswer, error) {
	features := structured.Features{
		AdminAccess:            true,
		ConsumableCapacity:     true,
		DeviceBindingAndStatus: true,
		DeviceTaints:           true,
		PartitionableDevices:   true,
		PrioritizedList:        true,
	}
	if len(asked.Features) > 0 {
		if err := json.Unmarshal(asked.Features, &features); err != nil {
			return nil, fmt.Errorf("decode features: %w", err)
		}
	}
	allocator, err := structured.NewAllocator(
		context.Background(), features, allocatedState(asked.Allocated), classes(asked.Classes), asked.Slices, cache)
	if err != nil {
		return nil, fmt.Errorf("create the allocator: %w", err)
	}
	answers := make(map[string]nodeAnswer, len(asked.Nodes))
	for _, node := range asked.Nodes {
		ctx, cancel := context.WithTimeout(context.Background(), searchTimeout)
		allocations, err := allocator.Allocate(ctx, node, asked.Claims)
		cancel()
		if err != nil {
			answers[node.Name] = nodeAnswer{Error: err.Error()}
		} else {
			answers[node.Name] = nodeAnswer{Allocations: allocations}
		}
	}
	return answers, nil
}

// allocatedState collects the devices of allocated claims as kube-scheduler does: admin access is left out, shares are
// summed.
func allocatedState(claims []*resourceapi.ResourceClaim) structured.AllocatedState {
	state := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, claim := range claims {
		if claim.Status.Allocation == nil {
			continue
		}
		for _, result := range claim.Status.Allocation.Devices.Results {
			if result.AdminAccess != nil && *result.AdminAccess {
				continue
			}
			id := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
			if result.ShareID == nil {
				state.AllocatedDevices.Insert(id)
				continue
			}
			state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, result.ShareID))
			if result.ConsumedCapacity != nil {
				state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, result.ConsumedCapacity))
			}
		}
	}
	return state
}

// selected evaluates every expression of the case on every device. Expressions that fail select no device.
func selected(asked *question, cache *cel.Cache) map[string][]string {
	found := make(map[string][]string)
	for _, expression := range expressions(asked) {
		names := []string{}
		for _, slice := range asked.Slices {
			for i := range slice.Spec.Devices {
				device := &slice.Spec.Devices[i]
				if evaluate(expression, slice.Spec.Driver, device, cache).Selected {
					names = append(names, fmt.Sprintf("%s/%s", slice.Name, device.Name))
				}
			}
		}
		found[expression] = names
	}
	return found
}

// expressions returns the distinct selectors of classes and claims.
func expressions(asked *question) []string {
	found := sets.New[string]()
	add := func(selectors []resourceapi.DeviceSelector) {
		for _, selector := range selectors {
			if selector.CEL != nil {
				found.Insert(selector.CEL.Expression)
			}
		}
	}
	for _, class := range asked.Classes {
		add(class.Spec.Selectors)
	}
	for _, claim := range asked.Claims {
		for _, request := range claim.Spec.Devices.Requests {
			if request.Exactly != nil {
				add(request.Exactly.Selectors)
			}
			for _, sub := range request.FirstAvailable {
				add(sub.Selectors)
			}
		}
	}
	list := found.UnsortedList()
	sort.Strings(list)
	return list
}

func evaluateAll(asked *question, cache *cel.Cache) []evaluation {
	evaluations := make([]evaluation, 0, len(asked.Expressions))
	for _, expression := range asked.Expressions {
		evaluations = append(evaluations, evaluate(expression, asked.Driver, asked.Device, cache))
	}
	return evaluations
}

func evaluate(expression, driver string, device *resourceapi.Device, cache *cel.Cache) evaluation {
	compiled := cache.GetOrCompile(expression)
	if compiled.Error != nil {
		return evaluation{CompileError: compiled.Error.Error()}
	}
	selected, _, err := compiled.DeviceMatches(context.Background(), cel.Device{
		Driver:                   driver,
		AllowMultipleAllocations: device.AllowMultipleAllocations,
		Attributes:               device.Attributes,
		Capacity:                 device.Capacity,
	})
	if err != nil {
		return evaluation{RuntimeError: err.Error()}
	}
	return evaluation{Selected: selected}
}
