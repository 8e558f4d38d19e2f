// Program scheduler answers, for generated clusters, on which nodes the plugins of kube-scheduler admit a pod, and with which
// scores. It also reads quantities and label selectors as Kubernetes does.
//
// It reads one JSON object per line and writes one JSON object per line.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/apis/config/latest"
	"k8s.io/kubernetes/pkg/scheduler/backend/cache"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/names"
	"k8s.io/kubernetes/pkg/scheduler/framework/runtime"
	"k8s.io/kubernetes/pkg/scheduler/metrics"
)

// multiPoint are the plugins that filter and score. Resources only filter: their scores are for pods without devices.
var multiPoint = sets.New(
	names.PrioritySort, names.NodeName, names.NodeUnschedulable, names.TaintToleration, names.NodeAffinity, names.NodePorts,
	names.VolumeZone, names.PodTopologySpread, names.InterPodAffinity, names.DefaultBinder,
)

// question is one line of the input: a pod, or quantities, or a selector.
type question struct {
	Nodes          []*v1.Node                  `json:"nodes,omitempty"`
	Namespaces     []*v1.Namespace             `json:"namespaces,omitempty"`
	Bound          []*v1.Pod                   `json:"bound,omitempty"`
	VolumeClaims   []*v1.PersistentVolumeClaim `json:"volumeClaims,omitempty"`
	Volumes        []*v1.PersistentVolume      `json:"volumes,omitempty"`
	StorageClasses []*storagev1.StorageClass   `json:"storageClasses,omitempty"`
	Pod            *v1.Pod                     `json:"pod,omitempty"`

	Quantities []string `json:"quantities,omitempty"`

	Selector *metav1.LabelSelector `json:"selector,omitempty"`
	Labels   []map[string]string   `json:"labels,omitempty"`
}

// answer is one line of the output.
type answer struct {
	// Nodes has a verdict per node.
	Nodes map[string]verdict `json:"nodes,omitempty"`
	// Quantities are decimal numbers, null if Kubernetes cannot read them.
	Quantities []*string `json:"quantities,omitempty"`
	// Selected tells for each set of labels whether the selector matches.
	Selected []bool `json:"selected,omitempty"`
	// Error reports a line that cannot be answered.
	Error string `json:"error,omitempty"`
}

// verdict on a node: why it is not admitted, or its score.
type verdict struct {
	Rejection string           `json:"rejection,omitempty"`
	Score     int64            `json:"score"`
	Scores    map[string]int64 `json:"scores,omitempty"`
}

func main() {
	// A framework counts its plugins.
	metrics.Register()
	if err := run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "scheduler:", err)
		os.Exit(1)
	}
}

func run(input io.Reader, output io.Writer) error {
	reader := bufio.NewReaderSize(input, 1<<20)
	writer := bufio.NewWriter(output)
	encoder := json.NewEncoder(writer)
	for {
		line, err := reader.ReadBytes('\n')
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read a question: %w", err)
		}
		if err := encoder.Encode(reply(line)); err != nil {
			return fmt.Errorf("write an answer: %w", err)
		}
		if err := writer.Flush(); err != nil {
			return fmt.Errorf("write an answer: %w", err)
		}
	}
}

func reply(line []byte) answer {
	var asked question
	if err := json.Unmarshal(line, &asked); err != nil {
		return answer{Error: fmt.Sprintf("decode the question: %v", err)}
	}
	var err error
	given := answer{Quantities: quantities(asked.Quantities)}
	if asked.Selector != nil {
		if given.Selected, err = selected(&asked); err != nil {
			return answer{Error: err.Error()}
		}
	}
	if asked.Pod != nil {
		if given.Nodes, err = decide(&asked); err != nil {
			return answer{Error: err.Error()}
		}
	}
	return given
}

func quantities(texts []string) []*string {
	read := make([]*string, 0, len(texts))
	for _, text := range texts {
		quantity, err := resource.ParseQuantity(text)
		if err != nil {
			read = append(read, nil)
			continue
		}
		decimal := quantity.AsDec().String()
		read = append(read, &decimal)
	}
	return read
}

func selected(asked *question) ([]bool, error) {
	selector, err := metav1.LabelSelectorAsSelector(asked.Selector)
	if err != nil {
		return nil, fmt.Errorf("read the selector: %w", err)
	}
	matched := make([]bool, 0, len(asked.Labels))
	for _, set := range asked.Labels {
		matched = append(matched, selector.Matches(labels.Set(set)))
	}
	return matched, nil
}

// decide filters the nodes, and scores those that are left.
func decide(asked *question) (map[string]verdict, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	snapshot := cache.NewSnapshot(asked.Bound, asked.Nodes)
	scheduler, err := newFramework(ctx, asked, snapshot)
	if err != nil {
		return nil, err
	}
	state := framework.NewCycleState()
	nodes, err := snapshot.NodeInfos().List()
	if err != nil {
		return nil, fmt.Errorf("list the nodes: %w", err)
	}
	verdicts := make(map[string]verdict, len(nodes))
	result, status, _ := scheduler.RunPreFilterPlugins(ctx, state, asked.Pod)
	var fit []fwk.NodeInfo
	for _, node := range nodes {
		name := node.Node().Name
		if status.IsSuccess() && (result.AllNodes() || result.NodeNames.Has(name)) {
			if filtered := scheduler.RunFilterPlugins(ctx, state, asked.Pod, node); !filtered.IsSuccess() {
				verdicts[name] = verdict{Rejection: filtered.Message()}
				continue
			}
			fit = append(fit, node)
			continue
		}
		verdicts[name] = verdict{Rejection: "prefilter: " + status.Message()}
	}
	if len(fit) == 0 {
		return verdicts, nil
	}
	if status := scheduler.RunPreScorePlugins(ctx, state, asked.Pod, fit); !status.IsSuccess() {
		return nil, fmt.Errorf("prepare the scores: %s", status.Message())
	}
	scored, status := scheduler.RunScorePlugins(ctx, state, asked.Pod, fit)
	if !status.IsSuccess() {
		return nil, fmt.Errorf("score: %s", status.Message())
	}
	for _, node := range scored {
		scores := make(map[string]int64)
		for _, score := range node.Scores {
			scores[score.Name] = score.Score
		}
		verdicts[node.Name] = verdict{Score: node.TotalScore, Scores: scores}
	}
	return verdicts, nil
}

func newFramework(ctx context.Context, asked *question, snapshot *cache.Snapshot) (framework.Framework, error) {
	defaults, err := latest.Default()
	if err != nil {
		return nil, fmt.Errorf("read the default configuration: %w", err)
	}
	profile := defaults.Profiles[0]
	var enabled []config.Plugin
	for _, plugin := range profile.Plugins.MultiPoint.Enabled {
		if multiPoint.Has(plugin.Name) {
			enabled = append(enabled, plugin)
		}
	}
	resources := config.PluginSet{Enabled: []config.Plugin{{Name: names.NodeResourcesFit}}}
	profile.Plugins = &config.Plugins{
		MultiPoint: config.PluginSet{Enabled: enabled},
		PreFilter:  resources,
		Filter:     resources,
	}
	factory := informers.NewSharedInformerFactory(fake.NewClientset(), 0)
	add := func(store interface{ Add(any) error }, object any) {
		if err == nil {
			err = store.Add(object)
		}
	}
	for _, namespace := range asked.Namespaces {
		add(factory.Core().V1().Namespaces().Informer().GetIndexer(), namespace)
	}
	for _, claim := range asked.VolumeClaims {
		add(factory.Core().V1().PersistentVolumeClaims().Informer().GetIndexer(), claim)
	}
	for _, volume := range asked.Volumes {
		add(factory.Core().V1().PersistentVolumes().Informer().GetIndexer(), volume)
	}
	for _, class := range asked.StorageClasses {
		add(factory.Storage().V1().StorageClasses().Informer().GetIndexer(), class)
	}
	if err != nil {
		return nil, fmt.Errorf("store an object: %w", err)
	}
	made, err := runtime.NewFramework(ctx, plugins.NewInTreeRegistry(), &profile,
		runtime.WithInformerFactory(factory), runtime.WithSnapshotSharedLister(snapshot), runtime.WithParallelism(1))
	if err != nil {
		return nil, fmt.Errorf("create the framework: %w", err)
	}
	return made, nil
}
